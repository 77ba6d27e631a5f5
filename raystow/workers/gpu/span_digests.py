"""Digests of parts of tensors in device memory, in a few launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...storage.coding import dtypes
from ...storage.coding.digest import finish
from .digests import Digests

_KEPT = 4  # tables: of a sample and of all bytes, for two journals
_tables: dict[int, tuple[Sequence[tuple[torch.Tensor, int, int]], Digests]] = {}


class DeviceSpan(NamedTuple):
    """A ``Source`` for ``Digests``: bytes from ``first`` to ``last`` of a tensor's memory."""

    tensor: torch.Tensor
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        """Bytes of the span."""
        return self.last - self.first

    @property
    def address(self) -> int | None:
        """Device address; None if the tensor must be gathered first."""
        return self.tensor.data_ptr() + self.first if self.tensor.is_contiguous() else None

    @property
    def dtype(self) -> dtypes.DType:
        """Words of 32 bits if the span consists of aligned ones; the digest does not depend on it."""
        aligned = not ((self.tensor.data_ptr() + self.first) % 4 or self.nbytes % 4)
        return dtypes.dtype("uint32" if aligned and self.tensor.is_contiguous() else "uint8")

    def gather(self) -> torch.Tensor:
        """A contiguous copy, made on the current stream."""
        return self.tensor.contiguous().reshape(-1).view(torch.uint8)[self.first : self.last].clone()


class SpanDigests(NamedTuple):
    """Digests that a device computes: sums in pinned memory, which are there after ``event``."""

    sums: torch.Tensor
    sizes: npt.NDArray[np.uint64]
    event: torch.cuda.Event

    @staticmethod
    def taken(device: torch.device, pieces: Sequence[tuple[torch.Tensor, int, int]]) -> SpanDigests:
        """Take the digests of bytes ``first`` to ``last`` of tensors on the current stream. For the same list as before, whose
        tensors are where they were, the kernels' tables are used again."""
        with torch.cuda.device(device):
            known = _tables.get(id(pieces))
            if known is None or known[0] is not pieces:
                known = _tables[id(pieces)] = pieces, Digests([DeviceSpan(*piece) for piece in pieces], device)
                for old in list(_tables)[:-_KEPT]:
                    del _tables[old]
            sums = known[1].take()
            event = torch.cuda.current_stream(device).record_event()
        return SpanDigests(sums, np.array([last - first for _, first, last in pieces], np.uint64), event)

    def numbers(self) -> npt.NDArray[np.uint64]:
        """Wait for the digests: uint64 [spans]."""
        self.event.synchronize()
        found: npt.NDArray[np.uint64] = finish(self.sums.numpy().view(np.uint64), self.sizes)
        return found
