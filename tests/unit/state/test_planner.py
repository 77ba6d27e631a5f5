from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.state import planner
from raystow.state.assignment import SMALL, shares_of
from raystow.state.chunks import Cut, cuts
from raystow.state.coverage import total
from raystow.state.planned_chunk import PlannedChunk
from raystow.state.planner import plan_save
from raystow.state.shards import Shard
from raystow.state.tree import Leaf
from raystow.storage.errors import StateError
from raystow.storage.format.groups import WEIGHTS
from raystow.storage.limits import MAX_NAME

DTYPES = {"uint8": 1, "bfloat16": 2, "float32": 4, "complex128": 16}


def shard(extent: tuple[int, ...], dtype: str = "uint8", *, shape: tuple[int, ...] | None = None, name: str = "t") -> Shard:
    leaf = Leaf((name,), name, None, True)
    return Shard(leaf, "tensor", dtype, shape or extent, (0,) * len(extent), extent, (), 0, np.empty(extent, f"V{DTYPES[dtype]}"))


@settings(max_examples=300, deadline=None)
@given(
    extent=st.lists(st.integers(1, 9), max_size=4).map(tuple),
    dtype=st.sampled_from(list(DTYPES)),
    limit=st.sampled_from([16, 24, 100, 1000]),
)
def test_boxes_tile_the_shard(extent: tuple[int, ...], dtype: str, limit: int) -> None:
    cut = [box for box, _, _ in cuts(shard(extent, dtype), limit)]
    times = np.zeros(extent, int)
    places = np.arange(times.size).reshape(extent)
    for offset, size in cut:
        box = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
        times[box] += 1
        assert math.prod(size) * DTYPES[dtype] <= limit
        inside = places[box].reshape(-1)
        assert np.array_equal(inside, np.arange(inside[0], inside[0] + inside.size)), "not contiguous in row-major order"
    assert (times == 1).all()
    assert len(cut) <= 1 or math.prod(extent) * DTYPES[dtype] > limit


def test_empty_tensors_have_a_row_and_empty_shards_have_none() -> None:
    assert cuts(shard((3, 0)), 16) == (Cut(((0, 0), (3, 0)), 0, 0),)
    assert cuts(shard((0, 4), shape=(8, 4)), 16) == ()


@settings(max_examples=100, deadline=None)
@given(
    large=st.lists(st.integers(SMALL + 1, 10 * SMALL), max_size=40),
    small=st.lists(st.integers(1, SMALL), max_size=10),
    holders=st.sets(st.integers(0, 50), min_size=1, max_size=7).map(lambda s: tuple(sorted(s))),
)
def test_a_share_is_disjoint_complete_and_balanced(large: list[int], small: list[int], holders: tuple[int, ...]) -> None:
    pieces = [
        PlannedChunk(shard((n,), name=f"t{i}"), Cut(((0,), (n,)), n, 0), None, WEIGHTS) for i, n in enumerate((*large, *small))
    ]
    stored = shares_of(pieces, holders)
    shares = {rank: [piece for holder, piece in stored if holder == rank] for rank in holders}
    taken = [id(piece) for mine in shares.values() for piece in mine]
    assert sorted(taken) == sorted(map(id, pieces))
    loads = [sum(piece.nbytes for piece in mine) for mine in shares.values()]
    assert max(loads) - min(loads) <= max(*large, sum(small), 0)
    first = set(map(id, shares[holders[0]]))
    assert all(id(piece) in first for piece in pieces[len(large) :]), (
        "small shards must be with the first rank, where readers search first"
    )


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 300_000), max_size=12), world=st.integers(1, 5))
def test_the_plans_of_all_ranks_have_every_chunk_once(sizes: list[int], world: int) -> None:
    state = {f"t{i}": np.zeros((n, 33), np.uint8) for i, n in enumerate(sizes)}
    plans = [plan_save(state, rank=rank, world_size=world) for rank in range(world)]
    found = sorted((p.shard.leaf.name, p.box) for plan in plans for p in plan.pieces)
    assert found == sorted({(p.shard.leaf.name, p.box) for p in plan_save(state, rank=0, world_size=1).pieces})
    assert sum(plan.nbytes for plan in plans) == 33 * sum(sizes)
    assert total(plan.coverage[1] for plan in plans) == plans[0].coverage[1]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"n" * MAX_NAME: 1}, r'state\["n+\.\.\.: the keys of a value take more than 65,536 characters \(use shorter'),
        (
            {"a": {"\U0001f600" * 6000: np.zeros(1)}},
            r'state\["a"\]\["\U0001f600+\.\.\.: the keys of a value take more than 65,536',
        ),
        ({"a": np.zeros(1, ">f8")}, "native byte order"),
        ({"a": torch.nested.nested_tensor([torch.ones(1)])}, "nested tensors"),
    ],
)
def test_a_state_that_the_format_cannot_store_is_refused(state: dict[str, object], message: str) -> None:
    with pytest.raises(StateError, match=message):
        plan_save(state, rank=0, world_size=1)


def test_the_container_of_too_many_plain_values_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MAX_ROWS", 1000)
    state = {"data": {"order": list(range(1000))}, "step": 1}
    with pytest.raises(StateError, match=r'state\["data"\]\["order"\]: more than 1,000 plain values \(make them an array\)'):
        plan_save(state, rank=0, world_size=1)
