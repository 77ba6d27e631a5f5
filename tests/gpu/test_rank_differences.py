"""A bit flipped in one replica on a GPU is named by the next save: of plain tensors, boxes, ``Replicate`` and HSDP."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from helpers.local_cluster import LocalCluster
from integration.ranks import Rank, every

import raystow
from raystow.storage.format.replica_difference import ReplicaDifference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]

State = dict[str, Any]


def state_of(world: int) -> State:
    """Tensors of each dtype, larger and smaller than a range, strided ones, and a box that all ranks have."""
    torch.manual_seed(0)
    big = torch.randn(1500, 1000, device="cuda")
    tensors: State = {
        "f32": big,
        "bf16": torch.randn(3_000_001, device="cuda").bfloat16(),
        "strided": torch.randn(900, 800, device="cuda").t(),
        "small": torch.randn(77, device="cuda").half(),
        "int": torch.arange(1_000_000, device="cuda"),
        "bool": torch.ones(4097, device="cuda", dtype=torch.bool),
        "complex": torch.randn(300, device="cuda", dtype=torch.complex128),
        "host": torch.arange(4000.0),
    }
    tensors["hybrid"] = raystow.Box(torch.randn(700, 600, device="cuda"), (700, 600), (0, 0), tuple(range(world)))
    return tensors


def flip(state: State, name: str, element: int) -> None:
    value = state[name].local if isinstance(state[name], raystow.Box) else state[name]
    at = torch.unravel_index(torch.tensor(element), value.shape)
    words = torch.view_as_real(value)[..., 0] if value.is_complex() else value
    words = words.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[words.element_size()])
    words[tuple(int(i) for i in at)] ^= 1


@pytest.mark.parametrize("codec", ["deflate", "cpu"])
@pytest.mark.parametrize("world", [2, 3])
def test_flipped_bits_on_a_gpu_are_named(world: int, codec: str) -> None:
    states = [state_of(world) for _ in range(world)]
    with LocalCluster(f"memory://ranks-{world}-{codec}", codec=codec, memory=512 << 20) as cluster:
        assert cluster.save_all(states, step=1).record.differences == ()
        for step, name in enumerate(states[0], start=2):
            whole = states[1][name].local if isinstance(states[1][name], raystow.Box) else states[1][name]
            element = whole.numel() * 2 // 3
            flip(states[1], name, element)
            (found,) = cluster.save_all(states, step=step).record.differences
            first = tuple(int(i) for i in torch.unravel_index(torch.tensor(element), whole.shape))
            assert (found.name, found.kind, found.within) == (name, "tensor", 1)
            assert found.first == first, "the box begins at the first element of the tensor"
            assert_sides(found, world)
            flip(states[1], name, element)
        assert cluster.save_all(states, step=99).record.differences == ()


def assert_sides(found: ReplicaDifference, world: int) -> None:
    if world > 2:
        assert found.odd == (1,)
        assert found.stored in ("majority", "minority")
    else:
        assert {*found.odd, *found.others} == {0, 1}


def test_a_save_from_two_devices_compares_both() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors = torch.randn(2, 600_000)
    states: list[State] = [{"w": tensors[0].to(f"cuda:{rank}"), "v": tensors[1].to(f"cuda:{rank}")} for rank in range(2)]
    with LocalCluster("memory://two-devices", memory=512 << 20) as cluster:
        assert cluster.save_all(states, step=1).record.differences == ()
        states[1]["w"][599_999] += 1
        (found,) = cluster.save_all(states, step=2).record.differences
    assert (found.name, found.first) == ("w", (599_999,))


DEVICE = "cuda"


def join_group(self: Rank, store: str) -> None:
    who = {"rank": self.checkpointer.rank, "world_size": self.checkpointer.world_size}
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", init_method=store, **who)


def weights_of(layout: str) -> State:
    """A layer on two ranks: its weight takes several ranges, its bias part of one. Nothing is communicated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate

    torch.manual_seed(0)
    layer = torch.nn.Linear(700, 1000, device=DEVICE)
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("replicate", "shard"))
    if layout == "hsdp":
        fully_shard(layer, mesh=mesh)
    found: State = {name: one.detach() for name, one in layer.named_parameters()}
    if layout == "replicate":
        everywhere = [Replicate(), Replicate()]
        found = {name: DTensor.from_local(one, mesh, everywhere, run_check=False) for name, one in found.items()}
    return found


def flip_weight(self: Rank) -> None:
    weight = self.state["weight"]
    getattr(weight, "_local_tensor", weight).view(torch.int32)[411, 17] ^= 1 << 20


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """Two processes with a GPU each."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # workers import this module
        ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
        found = [ray.remote(Rank).options(num_cpus=0, num_gpus=1).remote() for _ in range(2)]
        ray.get([one.begin.remote("memory://group", number, 2, {}) for number, one in enumerate(found)])
        every(found, "do", join_group, f"file://{tmp_path_factory.mktemp('group')}/store")
        yield found
        ray.shutdown()


@pytest.mark.parametrize("layout", ["plain", "replicate", "hsdp"])
def test_a_flipped_bit_of_two_processes_is_named(layout: str, ranks: list[Any], folder: Path) -> None:
    ray.get([one.begin.remote(str(folder), number, 2, {}) for number, one in enumerate(ranks)])
    every(ranks, "set", weights_of, layout)
    for step, flips in ((1, False), (2, True), (3, False)):
        if step > 1:
            ray.get(ranks[1].do.remote(flip_weight))  # the third save finds the bit as it was
        every(ranks, "save", step)
        first, second = every(ranks, "do", lambda self: (self.pending[-1].result(60), self.pending.pop().warnings)[1])
        differences = raystow.open(folder).versions()[-1].record.differences
        assert second == ()
        assert bool(first) == bool(differences) == flips
        if flips:
            (found,) = differences
            assert (found.name, found.first, found.elements) == ("weight", (411, 17), 1)
            assert {*found.odd, *found.others} == {0, 1}
            assert "differ in weight, element [411, 17] alone" in first[0]
    every(ranks, "leave")
