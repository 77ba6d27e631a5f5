"""Pins host memory for copies of a GPU: part by part, in the background, by several threads once somebody waits for it.

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
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from ...storage.coding.kernels import Bytes
from ...storage.errors import ClusterError

logger = logging.getLogger(__name__)

_THREADS = min(16, os.cpu_count() or 1)
_HUGE_PAGES, _POPULATE = 14, 23  # MADV_HUGEPAGE, MADV_POPULATE_WRITE (Linux 5.14)
_REMEDY = "pass a smaller memory= to Checkpointer, or raise the limit of locked memory (ulimit -l)"


class PinnedMemory:
    """Pins ``memory`` (uint8, page-aligned) in parts of ``part`` bytes, in the background. A copy must not cross parts.

    With ``ahead`` one thread pins until somebody waits for it: while many threads allocate pages, the rest of the process is slow
    to map memory and to launch kernels. CUDA does not pin an address again that was not unpinned, so memory is unpinned, at the
    latest, when this object is collected.
    """

    def __init__(self, memory: Bytes, part: int, *, ahead: bool = False) -> None:
        self.memory, self._part, self._ahead = memory, part, ahead
        threads = _pool(1) if ahead else _pool(_THREADS)
        self._parts: list[Future[int]] = [threads.submit(_pin, of) for of in self._split()]
        self._unpin = weakref.finalize(self, _unpin, self._parts)
        self._unpin.atexit = False  # copies may be in progress

    def wait(self, start: int) -> None:
        """Wait until the part that contains the byte ``start`` is pinned. Raises ``ClusterError`` if CUDA cannot pin it."""
        number = start // self._part
        if self._ahead and not self._parts[number].done():
            self._ahead = False
            self._hurry()
        self._parts[number].result()

    def whole(self) -> bool:
        """Wait until every part is pinned, or CUDA cannot pin it. Return whether it could."""
        return all(part.exception() is None for part in self._parts)

    def close(self) -> None:
        """Unpin the memory; copies must have ended."""
        for part in self._parts:
            if not part.cancel():
                part.exception()  # waits
        self._unpin()

    def _hurry(self) -> None:
        """Let all threads pin what no thread has begun."""
        for number, of in enumerate(self._split()):
            if self._parts[number].cancel():
                self._parts[number] = _pool(_THREADS).submit(_pin, of)

    def _split(self) -> Iterator[Bytes]:
        for start in range(0, self.memory.size, self._part):
            yield self.memory[start : start + self._part]


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
        """Keep a buffer for later, unless CUDA cannot pin it."""
        if not buffer.whole():
            buffer.close()
            return
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
    with _used_device():
        code = int(torch.cuda.cudart().cudaHostRegister(address, memory.size, 0))
    if code:
        what = f"CUDA cannot pin {math.ceil(memory.size / (1 << 20))} MiB of host memory (error {code})"
        raise ClusterError(what, remedy=_REMEDY)
    return address


def _unpin(parts: Sequence[Future[int]]) -> None:
    """Unpin parts; those that are being pinned once they are."""
    for part in parts:
        if not part.cancel():
            part.add_done_callback(_unregister)


def _unregister(part: Future[int]) -> None:
    if part.exception() is None and (address := part.result()):
        with _used_device():
            torch.cuda.cudart().cudaHostUnregister(address)


def _used_device() -> torch.cuda.device:
    """Select a device that this process uses. Calls of CUDA take half a gigabyte of the memory of the one that is selected, which
    is the first one in a new thread."""
    used = (index for index in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(index))
    return torch.cuda.device(next(used, -1))  # -1: do not select one


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return threads that pin. They end when the process does."""
    return ThreadPoolExecutor(threads, "raystow-pin")
