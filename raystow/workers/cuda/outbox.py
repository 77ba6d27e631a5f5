"""The staging ring as a GPU fills it: pinned once, its slots filled end to end by large copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch

from ...storage.errors import ClusterError
from ..ring import Ring

Part = tuple[int, int, int]
"""Slot, start in the slot, bytes."""


class Outbox:
    """A run of bytes may begin in one slot and end in the next. A slot is released when everything in it was announced.

    ``take`` gives a free slot, or None after a moment without one; ``release`` hears of slots in which nothing more will be
    announced.
    """

    def __init__(self, ring: Ring, *, take: Callable[[], int | None], release: Callable[[int], None]) -> None:
        self._ring, self._take, self._release = ring, take, release
        self._memory = torch.from_numpy(ring.memory)
        if torch.cuda.is_available():
            code = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0)
            if int(code):
                raise ClusterError(
                    f"CUDA cannot pin {self._memory.numel() >> 20} MiB of host memory (error {int(code)})",
                    remedy="pass a smaller memory= to Checkpointer",
                )
        self._slot, self._used = -1, ring.slot_size
        self._parts: Counter[int] = Counter()  # slot -> parts in it that were not announced
        self._open: set[int] = set()  # slots that were taken and not released

    @property
    def capacity(self) -> int:
        """Bytes of all slots."""
        return int(self._memory.numel())

    @property
    def held(self) -> int:
        """Bytes of the slots in which something is still to be announced, or to be written."""
        return len(self._open) * self._ring.slot_size

    def write(self, source: torch.Tensor, pieces: list[tuple[int, int]], relieve: Callable[[], None]) -> list[list[Part]]:
        """Enqueue a copy of ``source`` (uint8, contiguous) on the current stream.

        Where the bytes of each piece of it (start, bytes; ascending) will lie. ``relieve`` is called while there is no free slot:
        it sees to it that what has arrived is announced.
        """
        parts: list[list[Part]] = [[] for _ in pieces]
        done = k = 0
        while done < source.numel():
            if self._used == self._ring.slot_size:
                self._next_slot(relieve)
            size = min(self._ring.slot_size - self._used, source.numel() - done)
            at = self._slot * self._ring.slot_size + self._used
            self._memory[at : at + size].copy_(source[done : done + size], non_blocking=True)
            while k < len(pieces) and pieces[k][0] < done + size:
                start, end = pieces[k][0], sum(pieces[k])
                first = max(start, done)
                if min(end, done + size) > first:
                    parts[k].append((self._slot, self._used + first - done, min(end, done + size) - first))
                    self._parts[self._slot] += 1
                if end > done + size:
                    break
                k += 1
            done += size
            self._used += size
        return parts

    def announced(self, parts: Iterable[Part]) -> None:
        """The node worker knows these parts."""
        for slot, _, _ in parts:
            self._parts[slot] -= 1
        self._settle()

    def end(self) -> None:
        """Everything of this save has been written."""
        self._slot, self._used = -1, self._ring.slot_size
        self._settle()

    def abandon(self) -> None:
        """Nothing more of this save will be announced."""
        self._parts.clear()
        self.end()

    def close(self) -> None:
        """Unpin the memory."""
        if torch.cuda.is_available():
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        del self._memory

    def _next_slot(self, relieve: Callable[[], None]) -> None:
        self._slot = -1
        self._settle()
        while (slot := self._take()) is None:
            relieve()
        self._slot, self._used = slot, 0
        self._open.add(slot)

    def _settle(self) -> None:
        for slot in [slot for slot in self._open if slot != self._slot and not self._parts[slot]]:
            self._open.remove(slot)
            del self._parts[slot]
            self._release(slot)
