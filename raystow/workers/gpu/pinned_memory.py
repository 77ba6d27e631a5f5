"""Pins host memory for copies of a GPU: part by part, by several threads, in the background.

Most of the time goes into allocating pages, which the kernel does much faster with huge pages and several threads.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from ...storage.coding.kernels import Bytes
from ...storage.errors import ClusterError

logger = logging.getLogger(__name__)

_HUGE_PAGES, _POPULATE = 14, 23  # MADV_HUGEPAGE, MADV_POPULATE_WRITE (Linux 5.14)
_REMEDY = "pass a smaller memory= to Checkpointer, or raise the limit of locked memory (ulimit -l)"


class PinnedMemory:
    """Pins ``memory`` (uint8, page-aligned) in parts of ``part`` bytes, in the background. A copy must not cross parts."""

    def __init__(self, memory: Bytes, part: int) -> None:
        self.memory, self._part = memory, part
        starts = range(0, memory.size, part)
        self._parts: list[Future[int]] = [_pool().submit(_pin, memory[start : start + part]) for start in starts]

    def wait(self, start: int) -> None:
        """Wait until the part that contains the byte ``start`` is pinned. Raises ``ClusterError`` if CUDA cannot pin it."""
        self._parts[start // self._part].result()

    def close(self) -> None:
        """Unpin the memory; copies must have ended."""
        for pinned in self._parts:
            if not pinned.cancel() and pinned.exception() is None and (address := pinned.result()):
                torch.cuda.cudart().cudaHostUnregister(address)


class HostBuffers:
    """Pinned buffers, kept from one restore to the next."""

    def __init__(self) -> None:
        self._idle: list[PinnedMemory] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> PinnedMemory:
        """Return an idle buffer of ``nbytes``, or one that is being pinned."""
        with self._lock:
            for number, buffer in enumerate(self._idle):
                if buffer.memory.size == nbytes:
                    return self._idle.pop(number)
        return PinnedMemory(np.frombuffer(mmap.mmap(-1, nbytes), np.uint8), nbytes)

    def give_back(self, buffer: PinnedMemory) -> None:
        """Keep a buffer for later."""
        with self._lock:
            self._idle.append(buffer)

    def free(self) -> None:
        """Free all idle buffers."""
        with self._lock:
            idle, self._idle = self._idle, []
        for buffer in idle:
            buffer.close()


BUFFERS = HostBuffers()
"""The buffers of this process. ``GpuEncoder.close`` frees those that are idle."""


def _pin(memory: Bytes) -> int:
    """Allocate the pages of ``memory``, and pin them if there is a GPU. Return the address that is pinned, else 0."""
    address = memory.ctypes.data
    for advice in (_HUGE_PAGES, _POPULATE):  # a kernel that knows neither allocates small pages while it pins
        _madvise()(address, memory.size, advice)
    if not torch.cuda.is_available():
        return 0
    if code := int(torch.cuda.cudart().cudaHostRegister(address, memory.size, 0)):
        what = f"CUDA cannot pin {math.ceil(memory.size / (1 << 20))} MiB of host memory (error {code})"
        raise ClusterError(what, remedy=_REMEDY)
    return address


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Return the threads that pin. They end when the process does."""
    return ThreadPoolExecutor(min(16, os.cpu_count() or 1), "raystow-pin")
