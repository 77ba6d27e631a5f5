"""What GPUs code of a state."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from raystow.orchestrator.client.gpu_coding import GpuCodingChoice
from raystow.orchestrator.client.options import Compression
from raystow.state.assignment import HOST_LEAST, GpuCoding
from raystow.state.planner import SavePlan, plan_save

LARGE = torch.zeros(HOST_LEAST // 4)


Cuda = Callable[..., None]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Lets functions of ``torch.cuda`` return these values."""

    def returning(**values: object) -> None:
        for name, value in values.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)

    return returning


def planned(state: object, gpus: GpuCoding, cuda: Cuda) -> SavePlan:
    event = SimpleNamespace(synchronize=lambda: None)
    cuda(current_stream=SimpleNamespace(record_event=lambda: event))
    return plan_save(state, rank=0, world_size=1, gpus=gpus)


def coders(plan: SavePlan) -> dict[str, set[int | None]]:
    return {name: {p.device for p in plan.pieces if p.name == name} for name in {p.name for p in plan.pieces}}


def test_a_gpu_codes_large_floats_of_the_host(cuda: Cuda) -> None:
    state = {"w": LARGE, "n": torch.zeros(1 << 20, dtype=torch.int32), "a": np.zeros(1 << 20), "step": torch.zeros(9)}
    plan = planned(state, GpuCoding(host=1), cuda)
    assert coders(plan) == {"w": {1}, "n": {None}, "a": {1}, "step": {None}}
    assert set(plan.ready) == {1}


def test_a_small_state_takes_no_device_memory(cuda: Cuda) -> None:
    plan = planned({"w": LARGE[1:]}, GpuCoding(host=1), cuda)
    assert coders(plan) == {"w": {None}}
    assert not plan.ready


def test_ranks_with_and_without_a_gpu_cut_alike(cuda: Cuda) -> None:
    state = {"w": LARGE, "m": torch.zeros(3000, 7001, dtype=torch.float64)}
    boxes = [{(p.name, p.box) for p in planned(state, gpus, cuda).pieces} for gpus in (GpuCoding(), GpuCoding(host=0))]
    assert boxes[0] == boxes[1]


@pytest.mark.parametrize(
    ("options", "codec"), [({}, "cpu"), ({}, "ans"), ({"host": "cpu"}, "auto"), ({"process": "node"}, "auto")]
)
def test_the_host_is_coded_by_the_cpu_where_the_gpu_cannot(options: dict[str, str], codec: str, cuda: Cuda) -> None:
    cuda(is_initialized=True)
    assert GpuCodingChoice(Compression(codec, **options), codec).coding() == GpuCoding(codec != "cpu")


def test_a_process_without_cuda_codes_by_the_cpu() -> None:
    assert GpuCodingChoice(Compression(), "auto").coding() == GpuCoding()


@pytest.mark.parametrize("free", [4 << 30, 1 << 30])
def test_the_current_device_is_used_if_it_has_memory(free: int, cuda: Cuda) -> None:
    cuda(is_initialized=True, current_device=2, memory_reserved=0, memory_allocated=0, mem_get_info=(free, free))
    choice = GpuCodingChoice(Compression(), "auto")
    assert choice.coding() == GpuCoding(host=2 if free > 3 << 30 else None)
    cuda(mem_get_info=(8 << 30, 0))
    assert choice.coding() == GpuCoding(host=2 if free > 3 << 30 else None), "decided once"
