"""The memory of an entry: an anonymous file, which processes of a node pass to each other by its descriptor."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ...storage.errors import ProtocolError
from ...storage.object_store import Buffer

_PIECE = 32 << 20  # bytes that a thread writes at a time
_WRITERS = 4

_writers: ThreadPoolExecutor | None = None


class EntryMemory:
    """``descriptor`` is closed with it. Views stay valid."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size, self._descriptor = size, descriptor

    @staticmethod
    def received(descriptor: int, size: int) -> EntryMemory:
        """Take over a descriptor from another process; ``ProtocolError`` if it has not that size."""
        found = os.fstat(descriptor).st_size
        if found != size:
            os.close(descriptor)
            raise ProtocolError(f"an entry of {size} bytes came in memory of {found}")
        return EntryMemory(descriptor, size)

    @staticmethod
    def empty(size: int) -> EntryMemory:
        """Memory for an entry that comes from another node: fill ``target``."""
        descriptor = os.memfd_create("raystow-entry", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        return EntryMemory(descriptor, size)

    @staticmethod
    def of(parts: Sequence[Buffer], size: int) -> EntryMemory:
        """Copy an entry, given in parts; by several threads if it is large."""
        memory, at, pieces = EntryMemory.empty(size), 0, list[tuple[memoryview, int]]()
        for part in parts:
            view = memoryview(part).cast("B")
            for start in range(0, view.nbytes, _PIECE):
                piece = view[start : start + _PIECE]
                pieces.append((piece, at))
                at += piece.nbytes
        if size > _PIECE:
            list(_pool().map(memory._write, *zip(*pieces, strict=True)))
        else:
            for piece, start in pieces:
                memory._write(piece, start)
        return memory

    def _write(self, piece: memoryview, start: int) -> None:
        while piece.nbytes:
            written = os.pwrite(self._descriptor, piece, start)
            piece, start = piece[written:], start + written

    @property
    def target(self) -> memoryview:
        """All of it, to be filled."""
        return memoryview(mmap.mmap(self._descriptor, self.size))[: self.size]

    @property
    def content(self) -> memoryview:
        """All of it. The memory stays as long as somebody looks at it."""
        return self.target.toreadonly()

    def lend(self) -> int:
        """A descriptor, for the caller to close."""
        return os.dup(self._descriptor)

    def close(self) -> None:
        """Let go of the memory."""
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)


def _pool() -> ThreadPoolExecutor:
    global _writers
    if _writers is None:
        _writers = ThreadPoolExecutor(_WRITERS, "raystow-entry")
    return _writers
