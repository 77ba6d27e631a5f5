from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

import raystow
from raystow.state.planner import Planner, plan_save
from raystow.state.replica_digests import RangeDigest, first_difference, range_digest
from raystow.state.replica_groups import RANGE, Compared, comparing
from raystow.storage.coding.digest import raw_digest

State = dict[str, Any]
Digests = dict[int, tuple[RangeDigest, ...]]


def digests_of(states: list[State], save: int, planners: list[Planner] | None = None) -> list[Digests]:
    """Return the digests that each rank reports in a save, by group."""
    world, found = len(states), list[Digests]()
    for rank, state in enumerate(states):
        plan = plan_save(state, rank=rank, world_size=world, planner=planners and planners[rank], save=save)
        found.append({group.key: tuple(map(range_digest, group.ranges)) for group in plan.compared[0]})
    return found


def odd_ranks(found: list[Digests]) -> set[int]:
    """Return the ranks whose digests differ from those of most ranks with the same group."""
    by_group = defaultdict[int, dict[int, Any]](dict)
    for rank, digests in enumerate(found):
        for key, of in digests.items():
            by_group[key][rank] = of
    odd = set[int]()
    for by_rank in by_group.values():
        values = [*by_rank.values()]
        if len(set(values)) > 1:
            usual = max(values, key=values.count)
            odd |= {rank for rank, of in by_rank.items() if of != usual}
    return odd


def sample_state(world: int) -> State:
    return {
        "large": torch.arange(530_000, dtype=torch.float32).reshape(530, 1000),
        "small": torch.ones(33, 7, dtype=torch.bfloat16),
        "strided": torch.arange(530_000, dtype=torch.int16).reshape(530, 1000).t(),
        "array": np.arange(5000, dtype=np.uint8),
        "scalar": torch.tensor(3.0),
        "odd": torch.full((3,), float("nan"), dtype=torch.float64),
        "shards": raystow.Box(torch.zeros(270_000), (540_000,), (0,), tuple(range(world))),
    }


def flip(state: State, name: str, element: int, bit: int) -> None:
    """Flip one bit of an element in logical order."""
    value = state[name].local if isinstance(state[name], raystow.Box) else state[name]
    words = (torch.from_numpy(value) if isinstance(value, np.ndarray) else value).view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.itemsize]
    )
    index = np.unravel_index(element, tuple(words.shape))
    changed = (int(words[index]) ^ (1 << bit)) & ((1 << 8 * value.itemsize) - 1)
    sign = 1 << (8 * value.itemsize - 1)
    words[index] = changed if words.dtype is torch.uint8 else (changed ^ sign) - sign


@pytest.mark.parametrize("world", [2, 3, 5])
def test_flipped_bits_are_found_within_as_many_saves_as_holders(world: int) -> None:
    """Two hundred random flips in all: each is found, and blamed on the right rank where a majority exists."""
    rng = np.random.default_rng(world)
    states = [sample_state(world) for _ in range(world)]
    planners = [Planner() for _ in range(world)]
    assert odd_ranks(digests_of(states, 1, planners)) == set()
    flips = {2: 120, 3: 60, 5: 20}[world]
    for _ in range(flips):
        rank, name = int(rng.integers(world)), str(rng.choice([*states[0]]))
        value = states[rank][name].local if isinstance(states[rank][name], raystow.Box) else states[rank][name]
        size = value.numel() if isinstance(value, torch.Tensor) else value.size
        where = name, int(rng.integers(size)), int(rng.integers(8 * value.itemsize))
        flip(states[rank], *where)
        found = [odd_ranks(digests_of(states, save, planners)) for save in range(1, world + 1)]
        assert set().union(*found), (rank, where)
        if world > 2:
            assert set().union(*found) == {rank}
        flip(states[rank], *where)
    assert odd_ranks(digests_of(states, 1, planners)) == set()


@pytest.mark.parametrize("holders", [2, 3, 4, 5, 8, 13])
def test_all_holders_are_compared_with_each_writer(holders: int) -> None:
    ranks = tuple(range(10, 10 + holders))
    for writer, first in itertools.product(ranks, (1, 7)):
        saves = [comparing(ranks, writer, save) for save in range(first, first + holders)]
        assert all(one[0] == writer and len({*one}) == len(one) == min(3, holders) for one in saves)
        assert set().union(*saves) == {*ranks}


def test_equal_bits_with_unusual_values_are_no_difference() -> None:
    payload = torch.tensor([0x7FC12345, -0x80000000, 0], dtype=torch.int32).view(torch.float32)
    states = [{"nan": payload.clone(), "zero": np.array([-0.0, 0.0], np.float16)} for _ in range(3)]
    assert odd_ranks(digests_of(states, 1)) == set()
    states[2]["zero"][1] = -0.0
    assert odd_ranks(digests_of(states, 1)) == {2}


def test_parts_of_one_rank_are_not_compared() -> None:
    """Shards with one holder, uneven ones among them, and what is below ``PerRank``."""
    rows = [3, 3, 1]
    states: list[State] = []
    for rank, count in enumerate(rows):
        box = raystow.Box(torch.full((count, 4), float(rank)), (7, 4), (3 * rank, 0), (rank,))
        states.append({"uneven": box, "own": raystow.PerRank({"seed": rank, "noise": torch.full((5,), rank)}), "step": 3})
    assert digests_of(states, 1) == [{}, {}, {}]
    plans = [plan_save(state, rank=rank, world_size=3) for rank, state in enumerate(states)]
    values = [plan.compared[1] for plan in plans]
    assert [[{*group.names} - {""} for group in of] for of in values] == [[{"step"}] * 2] * 3
    assert values[0] == values[1] == values[2]


def test_only_the_holders_of_a_box_compare_it() -> None:
    """A tensor that the first and the last pipeline stage share."""
    states: list[State] = [{"tied": raystow.Box(torch.ones(9), (9,), (0,), (0, 2))} if rank != 1 else {} for rank in range(3)]
    first, between, last = digests_of(states, 1)
    assert between == {}
    assert first == last != {}
    states[2]["tied"].local[4] = 0
    assert odd_ranks(digests_of(states, 1))


@pytest.mark.parametrize(("compared", "names"), [("all", {"large", "small"}), ("small", {"small"}), ("off", set())])
def test_the_option_leaves_tensors_out(compared: Compared, names: set[str]) -> None:
    state = {"large": np.zeros(RANGE + 1, np.uint8), "small": np.zeros(RANGE, np.uint8), "step": 1}
    plan = plan_save(state, rank=0, world_size=2, planner=Planner(compared=compared))
    groups, values = plan.compared
    assert {one.info.name for group in groups for one in group.ranges} == names
    assert bool(values) == (compared != "off")


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_a_single_changed_element_is_found_by_its_digests(itemsize: int) -> None:
    rng = np.random.default_rng(itemsize)
    raw = rng.integers(0, 256, 300_001 * itemsize, dtype=np.uint8)
    for _ in range(30):
        other, element = raw.copy(), int(rng.integers(raw.size // itemsize))
        other[element * itemsize + rng.integers(itemsize)] ^= rng.integers(1, 256, dtype=np.uint8)
        one, two = (RangeDigest(raw_digest(words), raw_digest(words[:itemsize])) for words in (raw, other))
        assert first_difference(one, two, nbytes=raw.size, itemsize=itemsize) == (element, True)


def test_of_several_changed_elements_only_the_uppermost_is_known() -> None:
    raw = np.zeros(40_000, np.uint8)
    for changed, found in (([0, 900, 3000], (0, False)), ([900, 3000], None)):
        other = raw.copy()
        other[changed] = 255
        one, two = (RangeDigest(raw_digest(words), raw_digest(words[:1])) for words in (raw, other))
        assert first_difference(one, two, nbytes=raw.size, itemsize=1) == found
