"""Digests of parts of tensors in device memory, in a few launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...storage.coding import dtypes
from ...storage.coding.digest import finish
from .digests import Digests


class DeviceSpan(NamedTuple):
    """A ``Source`` for ``Digests``: bytes from ``first`` to ``last`` of a tensor's memory."""

    tensor: torch.Tensor
    first: int
    last: int

    @property
    def on_host(self) -> bool:
        """Always False."""
        return False

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
        row = self.tensor.nbytes // len(self.tensor)
        start = self.first // row
        rows = self.tensor[start : -(-self.last // row)].clone(memory_format=torch.contiguous_format)
        return rows.reshape(-1).view(torch.uint8)[self.first - start * row : self.last - start * row].clone()


class SpanDigester:
    """Takes the digests of bytes ``first`` to ``last`` of tensors of one device, which stay where they are. The kernels' tables
    are made once."""

    def __init__(self, device: torch.device, pieces: Sequence[tuple[torch.Tensor, int, int]]) -> None:
        self._device = device
        self._sizes = np.array([last - first for _, first, last in pieces], np.uint64)
        with torch.cuda.device(device):
            self._digests = Digests([DeviceSpan(*piece) for piece in pieces], device)
            self._made = torch.cuda.current_stream(device).record_event()

    def take(self) -> Callable[[], npt.NDArray[np.uint64]]:
        """Take them on the current stream; return a function that waits for them: uint64 [spans]."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._made)
            sums, event = self._digests.take(), stream.record_event()

        def numbers() -> npt.NDArray[np.uint64]:
            event.synchronize()
            found: npt.NDArray[np.uint64] = finish(sums.numpy().view(np.uint64), self._sizes)
            return found

        return numbers
