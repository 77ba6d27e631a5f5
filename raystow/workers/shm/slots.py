"""Counts the uses of the slots of a ring, so that the slots can be filled again, and keeps versions in them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from ...storage.coding.kernels import Bytes
from .ring import Ring, SlotPart


class SlotUse:
    """A chunk in slots, until it is called."""

    def __init__(self, slots: Slots, parts: Sequence[SlotPart]) -> None:
        self.slots, self.parts = slots, parts

    def __call__(self) -> None:
        """End the use."""
        self.slots.release([slot for slot, _, _ in self.parts])


class Slots:
    """Calls ``on_free``, from any thread, with slots that are filled completely and no longer in use. It closes the ring after
    ``retire``, once nothing uses it."""

    def __init__(self, ring: Ring, on_free: Callable[[list[int]], None]) -> None:
        self.ring, self._on_free = ring, on_free
        self._uses: Counter[int] = Counter()  # slot -> parts of chunks in it that are in use
        self._kept: Counter[int] = Counter()  # those among them that are parts of versions in memory
        self._leaving: set[int] = set()  # those among them that were such parts, and that readers still use
        self._filled: set[int] = set()  # slots in use in which no more chunks will be announced
        self._changed = threading.Condition()
        self.retired = False

    @property
    def reserved(self) -> int:
        """Bytes of the ring in which versions may stay, as long as it is filled."""
        return 0 if self.retired else self.ring.kept * self.ring.slot_size

    @property
    def room(self) -> int:
        """Bytes of further versions that may stay."""
        with self._changed:
            return (self.ring.kept - len(self._kept.keys() | self._leaving)) * self.ring.slot_size

    def take_over(self, parts: Sequence[SlotPart]) -> tuple[list[Bytes], SlotUse]:
        """Return the bytes of a chunk, and what to call when they are no longer used."""
        found = [self.ring.slot(slot)[at : at + size] for slot, at, size in parts]  # raises before anything is counted
        with self._changed:
            self._uses.update(slot for slot, _, _ in parts)
        return found, SlotUse(self, parts)

    def take_over_each(self, chunks: Sequence[Sequence[SlotPart]]) -> list[tuple[list[memoryview], SlotUse]]:
        """Return for each chunk what ``take_over`` does, with a view of each part."""
        found = [[self.ring.slot(slot)[at : at + size].data for slot, at, size in parts] for parts in chunks]
        with self._changed:
            self._uses.update(slot for parts in chunks for slot, _, _ in parts)
        return [(views, SlotUse(self, parts)) for views, parts in zip(found, chunks, strict=True)]

    def keep(self, parts: Sequence[SlotPart]) -> bool:
        """Use parts that are in use once more, for a version in memory, until ``drop_kept``. Returns False if too many slots are
        kept already, or still read although they are no longer kept."""
        slots = [slot for slot, _, _ in parts]
        with self._changed:
            if len(self._kept.keys() | self._leaving | {*slots}) > self.ring.kept:
                return False
            self._kept.update(slots)
            self._uses.update(slots)
        return True

    def drop_kept(self, parts: Sequence[SlotPart]) -> None:
        """End the use that ``keep`` began."""
        slots = [slot for slot, _, _ in parts]
        with self._changed:
            self._leaving.update(_subtract(self._kept, slots))
        self.release(slots)

    def filled(self, slots: Sequence[int]) -> None:
        """Note that no more chunks will be announced in some slots: each is free once those in it are no longer used."""
        with self._changed:
            free = [slot for slot in slots if slot not in self._uses]
            self._filled.update(slot for slot in slots if slot in self._uses)
        self._on_free(free)

    def release(self, slots: Sequence[int]) -> None:
        """End one use of each slot, as often as it is named."""
        with self._changed:
            unused = _subtract(self._uses, slots)
            self._leaving.difference_update(unused)
            free = [slot for slot in unused if slot in self._filled]
            self._filled.difference_update(free)
            if self.retired:
                self._discard(unused)
            self._changed.notify_all()
        self._on_free(free)

    def wait(self) -> None:
        """Wait until no slot is in use, but for versions in memory."""
        with self._changed:
            self._changed.wait_for(lambda: self._uses == self._kept)

    def retire(self) -> None:
        """End the filling of the ring: free the memory of all slots, of those in use when their uses end."""
        with self._changed:
            self.retired = True
            self._discard([slot for slot in range(self.ring.slots) if not self._uses[slot]])

    def _discard(self, slots: Sequence[int]) -> None:
        if self.ring.kept:
            self.ring.discard(slots)
        if not self._uses:
            self.ring.close()


def _subtract(counts: Counter[int], slots: Sequence[int]) -> list[int]:
    """Count each slot down, as often as it is named; remove those at zero, and return them."""
    for slot in slots:
        counts[slot] -= 1
    done = [slot for slot in {*slots} if not counts[slot]]
    for slot in done:
        del counts[slot]
    return done
