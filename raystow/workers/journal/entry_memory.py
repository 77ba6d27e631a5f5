"""The memory of an entry: an anonymous file, which processes of a node pass to each other by its descriptor.

It is filled through a mapping: writes to one file wait for each other, and stores of several threads do not. The system gives new
pages more slowly than they are filled, so the memory of the next entry is prepared while the training goes on.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ...storage import background
from ...storage.coding.kernels import Bytes
from ...storage.errors import ProtocolError
from ...storage.object_store import Buffer

_PIECE = 8 << 20  # bytes that a thread writes at a time
_PREPARED = 8 << 20  # bytes that are prepared at a time
_WORTH = 32 << 20  # bytes of the smallest entry whose successor's memory is prepared
_WRITERS = min(8, os.cpu_count() or 1)

_writers: ThreadPoolExecutor | None = None


class EntryMemory:
    """``descriptor`` is closed with it. Views stay valid."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size, self._descriptor = size, descriptor

    @staticmethod
    def received(descriptor: int, size: int) -> EntryMemory:
        """Take over a descriptor from another process, and seal the memory: if that process made it smaller, a read of a mapping
        would kill this process. ``ProtocolError`` if the memory has another size or cannot be sealed."""
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        except OSError as error:
            os.close(descriptor)
            raise ProtocolError(f"an entry of {size} bytes came in memory that cannot be sealed: {error}") from error
        found = os.fstat(descriptor).st_size
        if found != size:
            os.close(descriptor)
            raise ProtocolError(f"an entry of {size} bytes came in memory of {found}")
        return EntryMemory(descriptor, size)

    @staticmethod
    def empty(size: int) -> EntryMemory:
        """Memory that is to be filled: see ``fill`` and ``target``."""
        descriptor = os.memfd_create("raystow-entry", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        return EntryMemory(descriptor, size)

    @staticmethod
    def of(parts: Sequence[Buffer], size: int) -> EntryMemory:
        """New memory with an entry, given in parts."""
        memory = EntryMemory.empty(size)
        memory.fill(parts)
        return memory

    def fill(self, parts: Sequence[Buffer]) -> None:
        """Copy an entry, given in parts; by several threads if it is large."""
        pieces, at = list[tuple[Bytes, Bytes]](), 0
        target = np.frombuffer(self.target, np.uint8)
        for part in parts:
            source = np.frombuffer(part, np.uint8)
            for start in range(0, source.size, _PIECE):
                piece = source[start : start + _PIECE]
                pieces.append((target[at : at + piece.size], piece))
                at += piece.size
        if self.size > _PIECE:
            list(_pool().map(np.copyto, *zip(*pieces, strict=True)))
        else:
            for there, piece in pieces:
                np.copyto(there, piece)

    @property
    def target(self) -> memoryview:
        """All of it, to be filled."""
        return memoryview(mmap.mmap(self._descriptor, self.size))[: self.size]

    @property
    def content(self) -> memoryview:
        """All of it. The memory stays as long as somebody looks at it."""
        return self.target.toreadonly()

    def prepare(self, start: int, length: int) -> None:
        """Take the pages of some bytes from the system; ``OSError`` if it has none."""
        os.posix_fallocate(self._descriptor, start, length)

    def cut(self, size: int) -> None:
        """Make it smaller."""
        os.ftruncate(self._descriptor, size)
        self.size = size

    def lend(self) -> int:
        """A descriptor, for the caller to close."""
        return os.dup(self._descriptor)

    def close(self) -> None:
        """Let go of the memory."""
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)


class SpareMemory:
    """Prepares the memory of the next entry, which will be about as large as the last one. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._hurry, self._closed = threading.Lock(), threading.Event(), False
        self._spare: EntryMemory | None = None
        self._thread: threading.Thread | None = None

    def take(self, size: int) -> EntryMemory:
        """Memory for an entry of so many bytes: what is prepared by now, if it is large enough. The next one is begun."""
        with self._lock:
            self._hurry.set()
            if self._thread is not None:
                self._thread.join()  # until its current piece is there
            spare, self._spare, self._thread = self._spare, None, None
            if size >= _WORTH and not self._closed:
                self._hurry.clear()
                self._spare = EntryMemory.empty(size + size // 16)
                self._thread = background.start("raystow-spare", self._prepare, self._spare)
        if spare is None:
            return EntryMemory.empty(size)
        if not size <= spare.size <= 2 * size:
            spare.close()
            return EntryMemory.empty(size)
        spare.cut(size)
        return spare

    def close(self) -> None:
        """Let go of what is prepared."""
        with self._lock:
            self._closed = True
            self._hurry.set()
            if self._thread is not None:
                self._thread.join()
            if self._spare is not None:
                self._spare.close()
            self._spare = self._thread = None

    def _prepare(self, spare: EntryMemory) -> None:
        for start in range(0, spare.size, _PREPARED):
            if self._hurry.is_set():
                return
            try:
                spare.prepare(start, min(_PREPARED, spare.size - start))
            except OSError:
                return  # its pages are taken when it is filled


def _pool() -> ThreadPoolExecutor:
    global _writers
    if _writers is None:
        _writers = ThreadPoolExecutor(_WRITERS, "raystow-entry")
    return _writers
