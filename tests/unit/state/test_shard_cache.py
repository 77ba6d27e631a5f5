"""Cached data about the shard of a tensor is used for the same tensor in later saves, and for no other tensor."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from raystow.state.planner import Planner, plan_save
from raystow.state.shard_cache import ShardCache, TensorView
from raystow.state.shards import shard_of
from raystow.state.tree import flatten
from raystow.storage.errors import StateError

MEMORY = torch.arange(240, dtype=torch.float32)


def look(seen: ShardCache, tensor: Any) -> TensorView:
    (view,) = seen.look(flatten({"a": {"b": tensor}}))
    return view


def test_the_same_tensor_is_found_again() -> None:
    """The cache does not keep the elements of the tensor."""
    seen = ShardCache()
    first, again = look(seen, MEMORY.view(24, 10)), look(seen, MEMORY.view(24, 10).detach())
    assert again.shard is first.shard
    assert again.shard.local is None
    assert again.shard.leaf.value is None
    assert again.local.data_ptr() == MEMORY.data_ptr()


def test_arrays_are_not_kept_by_the_cache() -> None:
    seen, array = ShardCache(), np.arange(240)
    gone = weakref.ref(array)
    seen.look(flatten({"a": array, "b": MEMORY}))
    del array
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "other",
    [
        lambda: MEMORY.view(12, 20),
        lambda: MEMORY.view(10, 24).T,
        lambda: MEMORY[24:].view(24, 9),
        lambda: MEMORY.clone().view(24, 10),
        lambda: MEMORY.view(torch.int32).view(24, 10),
        lambda: torch.view_as_complex(MEMORY.view(12, 10, 2)),
        lambda: torch.view_as_complex(MEMORY.view(12, 10, 2)).conj(),
        lambda: torch.view_as_complex(MEMORY.view(12, 10, 2)).conj().imag,
        lambda: MEMORY.numpy().reshape(24, 10),
    ],
    ids=["shape", "strides", "length", "memory", "dtype", "complex", "conjugate", "negative", "array"],
)
def test_a_changed_tensor_is_not_taken_from_the_cache(other: Callable[[], Any]) -> None:
    seen = ShardCache()
    for state in (MEMORY.view(24, 10), torch.view_as_complex(MEMORY.view(12, 10, 2)), other()):
        view = look(seen, state)
    (leaf,) = flatten({"a": {"b": other()}})
    fresh = shard_of(leaf)
    for what in ("kind", "dtype", "shape", "extent", "device"):
        assert getattr(view.shard, what) == getattr(fresh, what)
    made = view.shard.with_elements(view.leaf, view.local)
    assert bytes(made.bits.tobytes()) == bytes(fresh.bits.tobytes())


def test_another_path_is_another_tensor_with_the_same_name() -> None:
    seen = ShardCache()
    assert seen.look(flatten({"a": {"b": MEMORY}}))[0].shard.leaf.path == ("a", "b")
    assert seen.look(flatten({"a.b": MEMORY}))[0].shard.leaf.path == ("a.b",)


@pytest.mark.parametrize(
    "tensor",
    [
        MEMORY.view(24, 10).to_sparse(),
        torch.empty(24, 10, device="meta"),
        torch.nested.nested_tensor([MEMORY], layout=torch.jagged),
    ],
    ids=["sparse", "meta", "nested"],
)
def test_an_unsupported_tensor_at_a_known_path_is_an_error(tensor: Any) -> None:
    seen = ShardCache()
    look(seen, MEMORY.view(24, 10))
    with pytest.raises(StateError, match="cannot be stored"):
        look(seen, tensor)


def test_the_pieces_refer_to_the_tensors_of_their_own_save() -> None:
    planner, kept = Planner(), MEMORY.clone()

    def save(value: float) -> bytes:
        kept.fill_(value)
        plan = plan_save({"x": kept.view(24, 10), "n": 1}, rank=0, world_size=1, planner=planner)
        (piece,) = plan.pieces
        found: bytes = piece.shard.bits.tobytes()
        plan.release()
        assert piece.shard.local is None
        return found

    assert [save(value) for value in (1.0, 2.0)] == [torch.full((240,), value).numpy().tobytes() for value in (1.0, 2.0)]


def test_a_tensor_with_too_little_storage_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An allocator may reuse the address of the freed memory, so the address alone does not show the difference."""
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda _: 4096)
    planner, tensor = Planner(), MEMORY.clone()
    state = {"a": [torch.ones(4), tensor[24:].view(24, 9)]}

    def save() -> int:
        plan = plan_save(state, rank=0, world_size=1, planner=planner)
        found = len(plan.pieces)
        plan.release()
        return found

    assert save() == 2
    tensor.untyped_storage().resize_(tensor.nbytes)
    assert save() == 2
    tensor.untyped_storage().resize_(tensor.nbytes - 1)
    with pytest.raises(StateError, match=r'state\["a"\]\[1\]: tensors whose memory was freed'):
        save()


@pytest.fixture
def alone() -> Iterator[None]:
    """Start a process group of one rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_dtensor_with_another_placement_is_another_tensor(alone: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

    def spread(mesh: Any, placement: Placement) -> Any:
        return DTensor.from_local(MEMORY.view(24, 10), mesh, [placement])

    seen, mesh = ShardCache(), init_device_mesh("cpu", (1,))
    first, again = look(seen, spread(mesh, Shard(0))), look(seen, spread(mesh, Shard(0)))
    assert again.shard is first.shard
    assert again.shard.extent == (24, 10)
    assert again.local.data_ptr() == MEMORY.data_ptr()
    assert look(seen, spread(mesh, Replicate())).shard is not first.shard
    assert look(seen, spread(init_device_mesh("cpu", (1,)), Replicate())).shard is not first.shard
    assert look(seen, MEMORY.view(24, 10)).shard.holders == ()


def test_arrays_are_planned_without_torch() -> None:
    script = """
import sys
import weakref
import numpy as np
sys.modules["torch"] = None  # importing it fails
from raystow.state.planner import plan_save
plan = plan_save({"a": np.arange(10), "n": np.float32(1)}, rank=0, world_size=1)
assert sorted(piece.name for piece in plan.pieces) == ["a", "n"]
"""
    subprocess.run([sys.executable, "-c", script], check=True)
