"""Digests of the ranges in device memory that a rank compares with other ranks, in a few launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...state.replica_groups import ReplicaRange
from ...storage.coding import dtypes
from ...storage.coding.digest import finish
from .digests import Digests

_PRIORITY = -5
"""Of the stream: ``fence`` waits for the reads, which take the GPU some milliseconds. At a lower priority they would wait for the
kernels of the training."""


@dataclass(frozen=True)
class _FirstElement:
    """The first element of a range, as a source of ``Digests``."""

    of: ReplicaRange

    @property
    def dtype(self) -> dtypes.DType:
        return self.of.dtype

    @property
    def nbytes(self) -> int:
        return self.of.dtype.itemsize

    @property
    def address(self) -> int | None:
        return self.of.address

    @property
    def on_host(self) -> bool:
        return self.of.on_host

    def gather(self) -> torch.Tensor:
        return self.of.gather().reshape(-1).view(torch.uint8)[: self.nbytes].clone()


class DeviceRanges:
    """The ranges of one device. The kernels' tables are made once."""

    def __init__(self, device: torch.device, ranges: Sequence[ReplicaRange]) -> None:
        self._device = device
        self._sizes = np.array([(one.nbytes, one.dtype.itemsize) for one in ranges], np.uint64).T
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(self._device, priority=_PRIORITY)
            with torch.cuda.stream(self._stream):
                self._digests = [Digests(of, self._device) for of in (ranges, [_FirstElement(one) for one in ranges])]

    def take(self, after: torch.cuda.Event) -> Callable[[], npt.NDArray[np.uint64]]:
        """Begin to take the digests, after an event. Return a function that waits for those of all ranges, and of their first
        elements: uint64 [2, ranges]."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            sums = [digests.take() for digests in self._digests]
            event = self._stream.record_event()

        def numbers() -> npt.NDArray[np.uint64]:
            event.synchronize()
            found: npt.NDArray[np.uint64] = finish(np.stack([one.numpy().view(np.uint64) for one in sums]), self._sizes)
            return found

        return numbers
