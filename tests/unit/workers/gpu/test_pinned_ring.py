"""The pinned ring with memory of the host. It copies as on a GPU, but each copy completes immediately."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.storage.errors import ClusterError
from raystow.workers.gpu.encode.pinned_ring import PinnedRing, RingRun
from raystow.workers.shm.coded_layout import parts
from raystow.workers.shm.ring import Ring

pytestmark = pytest.mark.usefixtures("host_copies")

SLOT = 64
Runs = list[list[tuple[int, int]]]


class RingEnds:
    """Both ends of a pinned ring. It keeps the free slots, and announces runs if a slot is requested and none is free."""

    def __init__(self, slots: int, data: st.DataObject) -> None:
        self.ring = Ring.create(slots * SLOT, SLOT)
        self.pinned = PinnedRing(self.ring, take=self.take, release=self.release)
        self.free = list(range(slots))
        self.released: list[int] = []  # released to the node worker, which has not freed them yet
        self.held: Counter[int] = Counter()  # slot -> spans in it that were written and not announced
        self.waiting: list[tuple[bytes, RingRun]] = []
        self.free_calls = 0
        self._data = data

    def take(self) -> int | None:
        return self.free.pop() if self.free else None

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            assert slot not in self.free, "released twice"
            assert slot not in self.released, "released twice"
            assert not self.held[slot], "released before all its spans were announced"
            self.released.append(slot)

    def write(self, source: bytes, pieces: list[tuple[int, int]]) -> None:
        run = self.pinned.write(np.frombuffer(source, np.uint8).ctypes.data, len(source), self.free_slots)
        for start, nbytes in pieces:
            where = parts(run, start, nbytes)
            assert b"".join(bytes(self.ring.slot(slot)[at : at + n]) for slot, at, n in where) == source[start : start + nbytes]
            assert all(size > 0 and at >= 0 and at + size <= SLOT for _, at, size in where)
        self.held.update(slot for _, slot, _, _ in run)
        self.waiting.append((source, run))

    def free_slots(self) -> None:
        """Free the slots that the node worker has, or announce a run if there are none."""
        self.free_calls += 1
        assert self.released or self.waiting, "no slot can be freed"
        self.free += self.released
        self.released.clear()
        if not self.free:
            self.announce()

    def announce(self) -> None:
        """Announce one of the waiting runs, after a check that its bytes are at its spans."""
        expected, run = self.waiting.pop(self._data.draw(st.integers(0, len(self.waiting) - 1)))
        assert b"".join(bytes(self.ring.slot(slot)[at : at + size]) for _, slot, at, size in run) == expected
        self.held.subtract(slot for _, slot, _, _ in run)
        self.pinned.announced([run])

    def all_free(self) -> bool:
        return sorted(self.free + self.released) == list(range(self.ring.slots))


@contextmanager
def ring_ends(slots: int, data: st.DataObject) -> Iterator[RingEnds]:
    made = RingEnds(slots, data)
    try:
        yield made
    finally:
        made.pinned.close()
        made.ring.close()


@st.composite
def runs(draw: st.DrawFn, slots: int) -> Runs:
    """Draw the runs of some saves. The pieces of a run have gaps between them, and a run is at least one slot smaller than the
    ring.
    """

    def run() -> list[tuple[int, int]]:
        pieces, end = [], 0
        for gap, nbytes in draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2 * SLOT)), max_size=12)):
            if end + gap + nbytes <= (slots - 1) * SLOT:
                pieces.append((end + gap, nbytes))
                end += gap + nbytes
        return pieces

    return [run() for _ in range(draw(st.integers(0, 8)))]


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(2, 5))
def test_every_piece_arrives_and_every_slot_is_released_once(data: st.DataObject, slots: int) -> None:
    with ring_ends(slots, data) as it:
        for save in range(data.draw(st.integers(1, 3), "saves")):
            for number, pieces in enumerate(data.draw(runs(slots))):
                size = sum(pieces[-1]) if pieces else 0
                it.write(bytes((save * 89 + number * 37 + i) % 251 for i in range(size)), pieces)
                for _ in range(data.draw(st.integers(0, len(it.waiting)), "announced")):
                    it.announce()
            it.pinned.end()
            while it.waiting:
                it.announce()
            assert it.all_free(), "a slot was kept"


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(2, 5))
def test_an_abandoned_save_releases_all_slots(data: st.DataObject, slots: int) -> None:
    with ring_ends(slots, data) as it:
        for pieces in data.draw(runs(slots)):
            it.write(bytes(sum(pieces[-1]) if pieces else 0), pieces)
        it.held.clear()
        it.waiting.clear()
        it.pinned.abandon()
        assert it.all_free()
        it.write(b"next" * 16, [(0, 64)])
        it.pinned.end()
        assert not it.all_free(), "released before it was announced"
        it.announce()
        assert it.all_free()


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_a_ring_of_two_slots_passes_any_number_of_bytes(data: st.DataObject) -> None:
    with ring_ends(2, data) as it:
        for number in range(20):
            it.write(bytes([number]) * SLOT, [(0, 40), (40, 24)])
        assert it.free_calls >= 18
        it.pinned.end()
        while it.waiting:
            it.announce()
        assert it.all_free()


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_an_announced_slot_is_kept_while_it_is_filled(data: st.DataObject) -> None:
    with ring_ends(2, data) as it:
        it.write(b"a" * 10, [(0, 10)])
        it.announce()
        assert it.released == []
        it.write(b"b" * SLOT, [(0, SLOT)])  # the end of the run is in the next slot
        assert it.released == []
        it.announce()
        assert len(it.released) == 1
        it.pinned.end()
        assert it.all_free()


def test_slots_that_are_announced_together_are_released_together() -> None:
    """The node worker gets one message for them."""
    released, free = list[list[int]](), list(range(4))
    ring = Ring.create(4 * SLOT, SLOT)
    pinned = PinnedRing(ring, take=free.pop, release=lambda slots: released.append([*slots]))
    source = np.zeros(3 * SLOT + 1, np.uint8)
    run = pinned.write(source.ctypes.data, source.size, lambda: None)
    pinned.announced([run])
    assert [sorted(slots) for slots in released] == [[1, 2, 3]]
    pinned.end()
    assert [sorted(slots) for slots in released] == [[1, 2, 3], [0]]
    pinned.close()
    ring.close()


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_a_slot_that_cannot_be_pinned_is_released(data: st.DataObject) -> None:
    """No save of a run over both slots succeeds; none takes a slot away from the next."""

    def cannot(start: int) -> None:
        if start:
            raise ClusterError("CUDA cannot pin it")

    with ring_ends(2, data) as it, pytest.MonkeyPatch.context() as broken:
        broken.setattr(it.pinned._pinned, "wait", cannot)
        for _ in range(3):
            with pytest.raises(ClusterError, match="cannot pin"):
                it.write(bytes(2 * SLOT), [])
            it.pinned.abandon()
            assert it.all_free()
            it.free_slots()
