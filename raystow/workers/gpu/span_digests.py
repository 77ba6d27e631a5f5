"""Digests of parts of tensors in device memory, in a few launches. The tables of the kernels are made again only if a tensor has
moved."""

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
_tables: dict[tuple[tuple[int, int], ...], Digests] = {}


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
    def taken(device: int, pieces: Sequence[tuple[torch.Tensor, int, int]]) -> SpanDigests:
        """Take the digests of bytes ``first`` to ``last`` of tensors on the current stream."""
        spans = [DeviceSpan(*piece) for piece in pieces]
        with torch.cuda.device(device):
            key = tuple((span.address or 0, span.nbytes) for span in spans)
            known = _tables.get(key) if all(address for address, _ in key) else None
            if known is None:
                known = Digests(spans, torch.device("cuda", device))
                _tables[key] = known
                for old in list(_tables)[:-_KEPT]:
                    del _tables[old]
            sums = known.take()
            event = torch.cuda.current_stream(device).record_event()
        return SpanDigests(sums, np.array([span.nbytes for span in spans], np.uint64), event)

    def numbers(self) -> npt.NDArray[np.uint64]:
        """Wait for the digests: uint64 [spans]."""
        self.event.synchronize()
        found: npt.NDArray[np.uint64] = finish(self.sums.numpy().view(np.uint64), self.sizes)
        return found
