"""Packs the lowest planes of words that are never negative: their last bits are all zero, so 7 of 8 bits are stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..kernel_args import upload
from ..kernels import copy_kernels
from .jobs import Job

COUNT = 4
"""The number of batches whose planes are packed or copied at a time."""


def worth_packing(jobs: Sequence[Job], low: int, odds: Sequence[int]) -> bool:
    """Return whether planes can be packed (``odds``: 0) that are more than a quarter of the ``low`` bytes of lowest planes.

    For less, the separate copies cost more than packing saves. Coded planes are not packed: ``low`` is 0 if the lowest ones are.
    """
    return low > 0 and sum(job.plane for job, odd in zip(jobs, odds, strict=True) if not odd) > low // 4


@dataclass
class PackedPlanes:
    """The lowest planes of a batch that are packed, into ``nbytes`` bytes."""

    rows: list[tuple[int, int, int]] = field(default_factory=list)  # the table of copy_kernels.pack7
    places: list[int | None] = field(default_factory=list)  # for each chunk the start of its packed plane; None: not packed
    nbytes: int = 0


class PackBuffers:
    """Device memory for the packed planes of a few batches, used in turn: ``plan``, ``pack``, then ``copied``."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._buffers, self._next = buffers, 0
        self._copied: list[torch.cuda.Event | None] = [None] * len(buffers)

    @property
    def current(self) -> torch.Tensor:
        """The buffer that is used next."""
        return self._buffers[self._next]

    def plan(self, jobs: Iterable[Job], starts: Sequence[int], odds: Sequence[int], base: int) -> PackedPlanes:
        """Select the planes of a batch that are packed, as far as they fit into the buffer. ``starts``: of each plane, relative
        to the address ``base``; ``odds``: 1 for each in which some last bit is set."""
        packed = PackedPlanes()
        for job, start, odd in zip(jobs, starts, odds, strict=True):
            size = -(-(job.plane // 8 * 7) // 16) * 16
            if odd or job.plane % 8 or packed.nbytes + size > self.current.numel():
                packed.places.append(None)
                continue
            packed.rows.append((base + start, self.current.data_ptr() + packed.nbytes, job.plane // 8))
            packed.places.append(packed.nbytes)
            packed.nbytes += size
        return packed

    def pack(self, packed: PackedPlanes, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Pack planes on a stream, once the buffer is free; return the event after which they are packed."""
        free = self._copied[self._next]
        if free is not None:
            stream.wait_event(free)
        with torch.cuda.stream(stream):
            table = upload(np.array(packed.rows, np.int64), self.current.device)
            copy_kernels.pack7(table, max(groups for _, _, groups in packed.rows))
            return stream.record_event()

    def copied(self, event: torch.cuda.Event) -> None:
        """Use the next buffer; the current one is free again after ``event``."""
        self._copied[self._next] = event
        self._next = (self._next + 1) % len(self._buffers)

    def reset(self) -> None:
        """Note that all buffers are free."""
        self._next, self._copied = 0, [None] * len(self._buffers)
