"""The results of ``word_kernels.split``: computed on the device, and copied to the host batch by batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..encode_request import Source
from ..kernel_args import Addressed, part
from ..kernels import copy_kernels
from ..kernels.word_kernels import FOUND
from .encode_plan import Batch, EncodePlan


class BatchResults:
    """The results of one save: for each batch int64 [FOUND, jobs], see ``word_kernels.split``."""

    def __init__(self, plan: EncodePlan, sources: Sequence[Source]) -> None:
        self._plan, self._count = plan, len(sources)
        self._on_device = torch.zeros(FOUND * len(sources), dtype=torch.int64, device=plan.chunks.device)
        self._pinned = torch.empty(FOUND * len(sources), dtype=torch.int64, pin_memory=True)
        self._on_host = self._pinned.numpy()

    def on_device(self, batch: Batch) -> Addressed:
        """Return the memory that the kernel adds its results to."""
        return part(self._on_device, FOUND * batch.first, FOUND * (batch.last - batch.first))

    def to_host(self, batch: Batch) -> npt.NDArray[np.int64]:
        """Copy the results of a batch to pinned host memory; they are there once the current stream has executed the copy."""
        copy_kernels.tell(self.on_device(batch), self._pinned.data_ptr() + 8 * FOUND * batch.first)
        return self._rows(batch)

    def digests(self) -> npt.NDArray[np.uint64]:
        """Return ``raw_digest`` of all sources before ``finish`` (uint64 [sources]), once all have been read."""
        digests = np.zeros(self._count, np.uint64)
        for batch in self._plan.batches:
            digests[self._plan.order[batch.first : batch.last]] = self._rows(batch)[0].view(np.uint64)
        return digests

    def _rows(self, batch: Batch) -> npt.NDArray[np.int64]:
        rows: npt.NDArray[np.int64] = self._on_host[FOUND * batch.first : FOUND * batch.last].reshape(FOUND, -1)
        return rows
