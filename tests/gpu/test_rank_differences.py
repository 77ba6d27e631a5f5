"""A bit flipped in one replica on a GPU is named by the next save, as plain tensors and as boxes that two ranks hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.local_cluster import LocalCluster

import raystow
from raystow.storage.format.replica_difference import ReplicaDifference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]

State = dict[str, Any]


def state_of(world: int) -> State:
    """Tensors of each dtype, larger and smaller than a range, strided ones, and a part that all ranks have."""
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
    tensors["hybrid"] = raystow.Box(torch.randn(700, 600, device="cuda"), (1400, 600), (0, 0), tuple(range(world)))
    return tensors


def flip(state: State, name: str, element: int) -> None:
    value = state[name].local if isinstance(state[name], raystow.Box) else state[name]
    at = torch.unravel_index(torch.tensor(element), value.shape)
    words = torch.view_as_real(value) if value.is_complex() else value
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
