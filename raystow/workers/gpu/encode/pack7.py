"""Lowest planes of words that are never negative: their last bits are all zero, so seven of eight bits leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..kernels import copy_kernels
from .jobs import Job

COUNT = 4
"""Batches whose planes are being packed, or are leaving, at a time."""


def worth_packing(jobs: Sequence[Job], low: int, odds: Any) -> bool:
    """Whether there are enough of the ``low`` bytes of lowest planes of which every last bit is zero (``odds``: 0). A few are not
    worth the copies that a run is broken into."""
    return sum(job.plane for job, odd in zip(jobs, odds.tolist(), strict=True) if not odd) > low // 4


class Packing(NamedTuple):
    """What ``moving.pack7`` takes, the bytes that it makes, and for each chunk where they begin; None: it is not packed."""

    rows: list[tuple[int, int, int]]
    used: int
    places: list[int | None]


class PackBuffers:
    """Memory for the packed planes of a few batches, used in turn: ``plan``, ``pack``, and ``leaves`` when that is on its way."""

    def __init__(self, rooms: list[torch.Tensor]) -> None:
        self._rooms, self._next = rooms, 0
        self._left: list[Any] = [None] * len(rooms)

    @property
    def room(self) -> torch.Tensor:
        """The next memory."""
        return self._rooms[self._next]

    def plan(self, jobs: Iterable[Job], starts: Sequence[int], odds: Sequence[int], base: int) -> Packing:
        """Which planes of a batch are packed, as far as there is room. ``starts``: where they begin, behind the address ``base``;
        ``odds``: 1 for each of which some last bit is not zero."""
        packing = Packing([], 0, [])
        for job, start, odd in zip(jobs, starts, odds, strict=True):
            size = -(-(job.plane // 8 * 7) // 16) * 16
            if odd or job.plane % 8 or packing.used + size > self.room.numel():
                packing.places.append(None)
                continue
            packing.rows.append((base + start, self.room.data_ptr() + packing.used, job.plane // 8))
            packing.places.append(packing.used)
            packing = packing._replace(used=packing.used + size)
        return packing

    def pack(self, packing: Packing, stream: Any) -> Any:
        """Pack on a stream, when the memory is free; the event after which all lies there."""
        if self._left[self._next] is not None:
            stream.wait_event(self._left[self._next])
        with torch.cuda.stream(stream):
            table = torch.from_numpy(np.array(packing.rows, np.int64)).pin_memory().to(self.room.device, non_blocking=True)
            copy_kernels.pack7(table, max(groups for _, _, groups in packing.rows))
            return stream.record_event()

    def leaves(self, event: Any) -> None:
        """From this event on the memory is free."""
        self._left[self._next] = event
        self._next = (self._next + 1) % len(self._rooms)

    def reset(self) -> None:
        """Everything has left."""
        self._left, self._next = [None] * len(self._rooms), 0
