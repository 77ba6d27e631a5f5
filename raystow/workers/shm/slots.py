"""Counts the chunks in the slots of a ring that are still in use, so that the slots can be filled again."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from ...storage.coding.kernels import Bytes
from .ring import Ring


class Slots:
    """Calls ``on_free``, from any thread, with slots that are filled completely and no longer in use."""

    def __init__(self, ring: Ring, on_free: Callable[[list[int]], None]) -> None:
        self._ring, self._on_free = ring, on_free
        self._uses: Counter[int] = Counter()  # slot -> parts of chunks in it that are in use
        self._filled: set[int] = set()  # slots in use in which no more chunks will be announced
        self._changed = threading.Condition()

    def take_over(self, parts: Sequence[tuple[int, int, int]]) -> tuple[list[Bytes], Callable[[], None]]:
        """Return the bytes of a chunk, and a function to call when they are no longer used. Each part: slot, start, size."""
        slots = [slot for slot, _, _ in parts]
        with self._changed:
            self._uses.update(slots)
        return [self._ring.slot(slot)[at : at + size] for slot, at, size in parts], functools.partial(self._done, slots)

    def filled(self, slot: int) -> None:
        """Note that no more chunks will be announced in a slot: it is free once those in it are no longer used."""
        with self._changed:
            busy = bool(self._uses[slot])
            if busy:
                self._filled.add(slot)
            else:
                del self._uses[slot]
        if not busy:
            self._on_free([slot])

    def wait(self) -> None:
        """Wait until no slot is in use."""
        with self._changed:
            self._changed.wait_for(lambda: not self._uses)

    def _done(self, slots: list[int]) -> None:
        with self._changed:
            self._uses.subtract(slots)
            free = [slot for slot in set(slots) if not self._uses[slot]]
            for slot in free:
                del self._uses[slot]
            free = [slot for slot in free if slot in self._filled]
            self._filled.difference_update(free)
            self._changed.notify_all()
        self._on_free(free)
