"""Digests of parts of tensors in device memory, in a few launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ...storage.coding import dtypes
from ...storage.coding.digest import finish
from .digests import Digests

_Numbers: TypeAlias = npt.NDArray[np.uint64]


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


def span_digests(device: torch.device, pieces: Sequence[tuple[torch.Tensor, int, int]]) -> Callable[[], Callable[[], _Numbers]]:
    """Prepare to digest bytes ``first`` to ``last`` of tensors of one device, which stay in place: make the kernels' tables.

    Returns:
        A function that takes the digests on the current stream. It returns one that waits for them: uint64 [spans].
    """
    sizes = np.array([last - first for _, first, last in pieces], np.uint64)
    with torch.cuda.device(device):
        digests = Digests([DeviceSpan(*piece) for piece in pieces], device)
        made = torch.cuda.current_stream(device).record_event()

    def take() -> Callable[[], _Numbers]:
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device)
            stream.wait_event(made)
            sums, event = digests.take(), stream.record_event()

        def numbers() -> _Numbers:
            event.synchronize()
            found: _Numbers = finish(sums.numpy().view(np.uint64), sizes)
            return found

        return numbers

    return take
