"""Parts of rings that are lent, and the runtime environment in which GPUs stay visible."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np
import pytest
from helpers.local_cluster import LocalCluster
from hypothesis import given
from hypothesis import strategies as st

from raystow.storage.runtime.clock import SYSTEM
from raystow.workers.node.actor import gpu_variables
from raystow.workers.shm.ring import SLOT, Ring, SlotPart
from raystow.workers.shm.slots import Slots, SlotUse


def test_a_part_of_a_ring_outlives_the_whole_ring() -> None:
    size = mmap.PAGESIZE
    ring = Ring.create(5 * size, size)
    back = ring.behind(2)
    assert (back.slots, back.memory.size) == (3, 3 * size)
    back.slot(0)[:] = 7
    ring.slot(4)[:] = 9
    assert ring.slot(2).tolist() == [7] * size
    assert back.slot(2).tolist() == [9] * size
    assert not ring.slot(1).any()
    ring.close()
    assert back.slot(2)[0] == 9
    back.close()


def test_a_slot_is_free_when_its_last_chunk_is_done() -> None:
    free: list[int] = []
    ring = Ring.create(2 * mmap.PAGESIZE, mmap.PAGESIZE)
    ring.slot(1)[5:8] = 3
    slots = Slots(ring, free.extend)
    parts, done = slots.take_over([(0, 0, 2), (1, 5, 3)])
    assert [part.tolist() for part in parts] == [[0, 0], [3, 3, 3]]
    slots.filled([0])
    assert free == []
    done()
    assert free == [0]
    slots.filled([1])
    assert free == [0, 1]
    slots.wait()


def test_of_chunks_with_one_outside_the_ring_none_is_taken_over() -> None:
    free: list[int] = []
    slots = Slots(Ring.create(2 * mmap.PAGESIZE, mmap.PAGESIZE), free.extend)
    with pytest.raises(IndexError):
        slots.take_over_each([[(0, 0, 2)], [(9, 0, 2)]])
    (parts, use), _ = slots.take_over_each([[(0, 0, 2), (1, 8, 1)], [(1, 0, 1)]])
    assert [part.nbytes for part in parts] == [2, 1]
    slots.filled([0])
    use()
    slots.filled([1])
    assert free == [0]


_STEP = st.tuples(st.sampled_from(["take", "fill", "done", "keep", "let go"]), st.integers(0, 9), st.integers(0, 9))


@given(st.lists(_STEP, min_size=40))
def test_a_slot_is_free_once_and_never_in_use(steps: list[tuple[str, int, int]]) -> None:
    """Of four slots, two may keep versions, less those that are still read after their version has left."""
    free: list[int] = []
    ring = Ring.create(2 * mmap.PAGESIZE, mmap.PAGESIZE, keep=2 * mmap.PAGESIZE)
    slots, filled, uses, kept = Slots(ring, free.extend), set[int](), list[SlotUse](), list[Sequence[SlotPart]]()
    leaving = set[int]()

    def slots_of(*all: Sequence[SlotPart]) -> set[int]:
        return {slot for parts in all for slot, _, _ in parts}

    for step, one, other in steps:
        parts = [(one % 4, 0, 8), (other % 4, 8, 8)]
        if step == "take" and not slots_of(parts) & filled:
            uses.append(slots.take_over(parts)[1])
        elif step == "fill" and one % 4 not in filled:
            filled.add(one % 4)
            slots.filled([one % 4])
        elif step == "done" and uses:
            uses.pop(one % len(uses))()
        elif step == "keep" and uses:
            parts = uses[one % len(uses)].parts
            small = len(slots_of(parts, *kept) | leaving) <= 2
            assert slots.keep(parts) == small
            kept += [parts] if small else []
        elif step == "let go" and kept:
            slots.drop_kept(left := kept.pop(one % len(kept)))
            leaving |= slots_of(left) - slots_of(*kept)
        leaving &= slots_of(*kept, *(use.parts for use in uses))
        assert sorted(free) == sorted(filled - slots_of(*kept, *(use.parts for use in uses)))
        filled.difference_update(free)
        free.clear()
    slots.retire()
    for use in uses:
        use()
    for parts in kept:
        slots.drop_kept(parts)
    assert not hasattr(ring, "memory")  # closed


def test_small_saves_use_the_memory_of_one_slot() -> None:
    """Slots that are used in turn would take the memory of the whole ring, whatever the size of the state."""
    with LocalCluster(f"memory://slots-{SYSTEM.token()}") as cluster:
        for step in range(1, 5):
            cluster.save({"w": np.full(3 << 20, step, np.uint8)}, step=step)
        ring = cluster._stagings[0][1].ring
        assert 0 < 512 * os.fstat(ring.fd).st_blocks <= SLOT


@pytest.mark.parametrize(("version", "is_set"), [("2.50.1", True), ("2.55.0", True), ("2.56.0", False), ("3.0.0.dev0", False)])
def test_older_ray_versions_are_set_to_keep_gpus_visible(version: str, is_set: bool) -> None:
    assert bool(gpu_variables(version)) == is_set
