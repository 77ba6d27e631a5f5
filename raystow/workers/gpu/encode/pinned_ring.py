"""Writes to the staging ring from a GPU: the ring's memory is pinned once, and its slots are filled by large copies.

The memory is pinned in the background; a slot is filled as soon as its part is pinned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from ...protocol.messages import RunSpan
from ...shm.ring import Ring
from ..kernels.library import copy_to_host
from ..pinned_memory import PinnedMemory

_PART = 64 << 20  # bytes that are pinned together


RingRun: TypeAlias = tuple[RunSpan, ...]
"""Where consecutive bytes were copied to."""


class PinnedRing:
    """Writes runs of bytes to the ring. A run may span slots.

    Args:
        ring: The ring; it is pinned until ``close``.
        take: Returns a free slot, or None after a short wait.
        release: Called for slots once all runs in them have been announced and no more will be written.
        free: Returns the bytes of all free slots.
    """

    def __init__(
        self,
        ring: Ring,
        *,
        take: Callable[[], int | None],
        release: Callable[[Sequence[int]], None],
        free: Callable[[], int] = lambda: 0,
    ) -> None:
        self._ring, self._take, self._release, self._free = ring, take, release, free
        self._address = ring.memory.ctypes.data
        self._pinned = PinnedMemory(ring.memory, max(1, _PART // ring.slot_size) * ring.slot_size, ahead=True)
        self._slot, self._used = -1, ring.slot_size
        self._runs: Counter[int] = Counter()  # slot -> spans in it that are not announced yet
        self._open: set[int] = set()  # slots that are not released yet

    @property
    def capacity(self) -> int:
        """Bytes that no version keeps."""
        return (self._ring.slots - self._ring.kept) * self._ring.slot_size

    @property
    def room(self) -> int:
        """Bytes that can be written once the node worker has uploaded all that was announced."""
        return max(self._free(), self.capacity - len(self._open) * self._ring.slot_size)

    def write(self, source: int, nbytes: int, relieve: Callable[[], None]) -> RingRun:
        """Enqueue a copy on the current stream.

        Args:
            source: The address of the bytes on the device.
            relieve: Called while there is no free slot; it must announce runs that have arrived.
        """
        run, done = list[RunSpan](), 0
        while done < nbytes:
            if self._used == self._ring.slot_size:
                self._next_slot(relieve)
            size = min(self._ring.slot_size - self._used, nbytes - done)
            at = self._slot * self._ring.slot_size + self._used
            copy_to_host(self._address + at, source + done, size)
            run.append((done, self._slot, self._used, size))
            self._runs[self._slot] += 1
            done += size
            self._used += size
        return tuple(run)

    def announced(self, runs: Iterable[RingRun]) -> None:
        """Note that these runs were announced to the node worker."""
        for run in runs:
            for _, slot, _, _ in run:
                self._runs[slot] -= 1
        self._settle()

    def end(self) -> None:
        """End a save: all its runs have been written."""
        self._slot, self._used = -1, self._ring.slot_size
        self._settle()

    def abandon(self) -> None:
        """Abort a save: no more of its runs will be announced."""
        self._runs.clear()
        self.end()

    def close(self) -> None:
        """Unpin the memory."""
        self._pinned.close()
        del self._pinned

    def _next_slot(self, relieve: Callable[[], None]) -> None:
        self._slot = -1
        self._settle()
        while (slot := self._take()) is None:
            relieve()
        self._open.add(slot)  # so that it is released if it cannot be pinned
        self._pinned.wait(slot * self._ring.slot_size)
        self._slot, self._used = slot, 0

    def _settle(self) -> None:
        done = [slot for slot in self._open if slot != self._slot and not self._runs[slot]]
        for slot in done:
            self._open.remove(slot)
            del self._runs[slot]
        if done:
            self._release(done)
