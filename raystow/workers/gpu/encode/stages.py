"""Work in progress of an encoder: batches that are read, groups that are coded, chunks that have arrived in host memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from ...protocol.messages import BatchBytes, CodedBatches
from .encode_plan import Batch, Group
from .pinned_ring import RingRun


@dataclass(frozen=True)
class TakenDigests:
    """Digests of what is stored of ``chunks`` chunks: of those at ``places``. ``found``, int64 [places, 4] in host memory, has
    them after the event ``done``."""

    chunks: int
    places: npt.NDArray[np.int64]
    found: torch.Tensor
    done: torch.cuda.Event

    def packed(self) -> bytes:
        """Return them as ``messages.CodedBatches`` has them."""
        if not len(self.places):
            return b""
        digests = np.zeros((self.chunks, 4), np.int64)
        digests[self.places] = self.found.numpy()
        return digests.tobytes()


@dataclass
class ReadBatch:
    """A batch that is being read, until the event ``done``. For ``runs`` and ``lows`` see ``messages.BatchBytes``. ``packed_at``:
    the address of its packed planes in device memory; ``digests``: of its chunks, if nothing of them is coded."""

    number: int  # in the plan
    batch: Batch
    done: torch.cuda.Event
    found: npt.NDArray[np.int64]  # results of word_kernels.split in host memory, [FOUND, jobs]
    copies: list[torch.Tensor]  # gathered chunks, which the kernel reads
    runs: list[RingRun] = field(default_factory=list)
    lows: list[tuple[int, int, bool]] = field(default_factory=list)
    packed_at: int = 0
    digests: TakenDigests | None = None

    def message(self) -> BatchBytes:
        """Return the message that announces its bytes."""
        return BatchBytes(self.number, self.found[0].tobytes(), tuple(self.runs), tuple(self.lows))


@dataclass
class CodedGroup:
    """A group that is being coded, until the event ``done``."""

    group: Group
    batches: list[ReadBatch]
    start: int  # of its coded planes in dense device memory
    results: torch.Tensor  # int64 [2, streams] in host memory: bytes of each stream and, as int32, the coder's status
    done: torch.cuda.Event
    size: int = 0  # bytes of the coded planes, once they are coded
    digests: TakenDigests | None = None  # of its chunks, once they are coded


@dataclass(frozen=True)
class Arrived:
    """Chunks whose bytes are all in host memory, in ``runs``, and the message that announces them."""

    runs: list[RingRun]
    message: CodedBatches
