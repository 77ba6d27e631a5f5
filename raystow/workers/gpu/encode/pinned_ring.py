"""The staging ring as a GPU fills it: pinned once, its slots filled end to end by large copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from ....storage.errors import ClusterError
from ...shm.ring import Ring


@dataclass
class RingRun:
    """Bytes on their way: ``spans`` of them (first byte in the run, slot, start in the slot, bytes)."""

    spans: list[tuple[int, int, int, int]] = field(default_factory=list)


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
        self._runs: Counter[int] = Counter()  # slot -> spans in it of runs that were not announced
        self._open: set[int] = set()  # slots that were taken and not released

    @property
    def capacity(self) -> int:
        """Bytes of all slots."""
        return int(self._memory.numel())

    @property
    def held(self) -> int:
        """Bytes of the slots in which something is still to be announced, or to be written."""
        return len(self._open) * self._ring.slot_size

    def write(self, source: torch.Tensor, relieve: Callable[[], None]) -> RingRun:
        """Enqueue a copy of ``source`` (uint8, contiguous) on the current stream.

        ``relieve`` is called while there is no free slot: it sees to it that what has arrived is announced.
        """
        run, done, total = RingRun(), 0, source.numel()
        while done < total:
            if self._used == self._ring.slot_size:
                self._next_slot(relieve)
            size = min(self._ring.slot_size - self._used, total - done)
            at = self._slot * self._ring.slot_size + self._used
            self._memory[at : at + size].copy_(source[done : done + size], non_blocking=True)
            run.spans.append((done, self._slot, self._used, size))
            self._runs[self._slot] += 1
            done += size
            self._used += size
        return run

    def announced(self, runs: Iterable[RingRun]) -> None:
        """The node worker knows of all that is in these."""
        for run in runs:
            for _, slot, _, _ in run.spans:
                self._runs[slot] -= 1
        self._settle()

    def end(self) -> None:
        """Everything of this save has been written."""
        self._slot, self._used = -1, self._ring.slot_size
        self._settle()

    def abandon(self) -> None:
        """Nothing more of this save will be announced."""
        self._runs.clear()
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
        for slot in [slot for slot in self._open if slot != self._slot and not self._runs[slot]]:
            self._open.remove(slot)
            del self._runs[slot]
            self._release(slot)
