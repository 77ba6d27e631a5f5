"""What an encoder has under way: batches that are read, groups that are coded, chunks that have arrived."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ...protocol.messages import BatchBytes, CodedBatches
from .encode_plan import Batch, Group
from .pinned_ring import RingRun


@dataclass
class ReadBatch:
    """A batch that is being read (until the event ``read``), is leaving, or has left. ``found``: int64 [FOUND, jobs] in host
    memory, what ``kernels.split`` has found. For ``runs`` and ``lows`` see ``messages.BatchBytes``."""

    number: int
    batch: Batch
    read: Any
    found: torch.Tensor
    copies: list[torch.Tensor]
    runs: list[RingRun] = field(default_factory=list)
    lows: list[tuple[int, int, bool]] = field(default_factory=list)

    def places(self) -> BatchBytes:
        """Return what is announced of it."""
        runs = tuple(tuple(run.spans) for run in self.runs)
        return BatchBytes(self.number, self.found[0].numpy().tobytes(), runs, tuple(self.lows))


@dataclass
class CodedGroup:
    """A group that is being coded (until the event ``coded``), and then lies densely in ``size`` bytes at ``start`` in device
    memory. ``results``: int64 [2, streams] in host memory, bytes of each and, as int32, the coder's status. ``run``: all its
    planes, on their way."""

    group: Group
    batches: list[ReadBatch]
    start: int
    results: torch.Tensor
    coded: Any
    size: int = 0
    run: RingRun = field(default_factory=RingRun)


@dataclass(frozen=True)
class Arrived:
    """Chunks that are in host memory, all of whose bytes are in these ``runs``, and the message that announces them."""

    runs: list[RingRun]
    message: CodedBatches
