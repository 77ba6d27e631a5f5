"""What the kernel that takes chunks apart finds of them: added up on the device, and told to the host batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from ..kernels import copy_kernels
from ..kernels.word_kernels import FOUND
from .encode_plan import Batch, Program
from .jobs import Source


class Found:
    """Of one save of ``sources``. Of each batch: int64 [FOUND, jobs of the batch], see ``kernels.split``."""

    def __init__(self, sources: Sequence[Source], device: torch.device) -> None:
        self._sources = sources
        self._sums = torch.zeros(FOUND * len(sources), dtype=torch.int64, device=device)
        self._told = torch.empty(FOUND * len(sources), dtype=torch.int64, pin_memory=True)

    def on_device(self, batch: Batch) -> torch.Tensor:
        """Where the kernel adds it up."""
        return _of(batch, self._sums)

    def tell(self, batch: Batch) -> torch.Tensor:
        """Write it to host memory, where it is when the current stream is through."""
        copy_kernels.tell(self.on_device(batch), told := self.of(batch))
        return told

    def of(self, batch: Batch) -> torch.Tensor:
        """It, in host memory."""
        return _of(batch, self._told)

    def digests(self, program: Program) -> Any:
        """The sums of ``raw_digest`` of all sources, when all was read (uint64 numpy [sources])."""
        sums = np.zeros(len(self._sources), np.uint64)
        for batch in program.batches:
            numbers = [job.index for job in program.jobs[batch.first : batch.last]]
            sums[numbers] = self.of(batch)[0].numpy().view(np.uint64)
        return sums

    def followed(self, program: Program) -> dict[int, int]:
        """By the identity of each source whose words are rounded as well, its number."""
        return {id(self._sources[job.index]): job.index for job in program.jobs if job.followed}

    def rounded(self, program: Program) -> Any:
        """Of each of these by number, when all was read: the sum of ``raw_digest`` of its words rounded, and whether any
        of them is a NaN (int64 numpy [2, sources])."""
        told = np.zeros((2, len(self._sources)), np.int64)
        for batch in program.batches:
            if batch.followed:
                told[:, [job.index for job in program.jobs[batch.first : batch.last]]] = self.of(batch)[3:].numpy()
        return told


def _of(batch: Batch, rows: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, rows[FOUND * batch.first : FOUND * batch.last].view(FOUND, -1))
