"""Parts of rings that are lent, and the runtime environment in which GPUs stay visible."""

from __future__ import annotations

import mmap

import pytest

from raystow.workers.node.actor import _environment
from raystow.workers.shm.ring import Ring
from raystow.workers.shm.slots import Slots


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
    slots.filled(0)
    assert free == []
    done()
    assert free == [0]
    slots.filled(1)
    assert free == [0, 1]
    slots.wait()


@pytest.mark.parametrize(("version", "told"), [("2.50.1", True), ("2.55.0", True), ("2.56.0", False), ("3.0.0.dev0", False)])
def test_older_ray_versions_are_set_to_keep_gpus_visible(version: str, told: bool) -> None:
    assert (_environment(version) is not None) == told
