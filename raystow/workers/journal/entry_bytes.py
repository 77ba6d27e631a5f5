"""The bytes of entries on their way between a training process and the worker of its node.

Both processes map the same memory, which is used again for later entries: its pages are there, and mapped. The node worker copies
entries into memory of its own, for which the system may give huge pages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ...storage.coding.kernels import Bytes
from ...storage.errors import ProtocolError
from ...storage.object_store import Buffer
from ..protocol.messages import Span
from ..shm.anonymous_memory import AnonymousMemory

_PIECE = 8 << 20  # bytes that a thread copies at a time
_GROWTH = 1 << 30  # bytes by which memory grows; pages are allocated at their first use

POOL = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "raystow-entry")
"""Threads that copy, digest and decode the bytes of entries, without the interpreter lock."""


class SharedBuffer:
    """The bytes of one entry in a training process, until the node worker has copied them.

    Args:
        share: Called with the memory when it is new or has grown.
    """

    def __init__(self, share: Callable[[AnonymousMemory], None]) -> None:
        self._share, self._memory = share, AnonymousMemory.empty(0)
        self._mapped, self._used = list[Bytes](), 0

    def clear(self) -> None:
        """Begin another entry."""
        self._used = 0
        del self._mapped[:-1]

    def take(self, nbytes: int) -> Bytes:
        """The next bytes, to be filled."""
        first, self._used = self._used, self._used + nbytes
        if self._used > self._memory.size or not self._mapped:
            self._memory.grow(-(-max(self._used, 1) // _GROWTH) * _GROWTH)
            self._mapped.append(np.frombuffer(self._memory.target, np.uint8))
            self._share(self._memory)
        return self._mapped[-1][first : self._used]

    def spans(self, parts: Sequence[Buffer]) -> list[Span]:
        """Where the bytes of these parts are. Parts that are not from ``take`` are copied."""
        arrays = [np.frombuffer(part, np.uint8) for part in parts]
        starts = [self._start(array) for array in arrays]
        others = [array for array, start in zip(arrays, starts, strict=True) if start is None]
        at = self._used
        copy_all(self.take(sum(array.size for array in others)), others)
        found = list[Span]()
        for array, start in zip(arrays, starts, strict=True):
            if start is None:
                start, at = at, at + array.size
            found.append((start, start + array.size))
        return found

    def close(self) -> None:
        """Let go of the descriptor. The memory stays while an entry is put together in it."""
        self._memory.close()

    def _start(self, part: Bytes) -> int | None:
        """Where a part is; earlier mappings begin at the same byte."""
        for mapped in self._mapped:
            start = part.ctypes.data - mapped.ctypes.data
            if 0 <= start < mapped.size:
                return start
        return None


class SharedMemories:
    """The memory that a training process shares with this node worker, by the numbers that the process has given it."""

    def __init__(self) -> None:
        self._mapped: dict[int, Bytes] = {}

    def share(self, number: int, size: int, descriptor: int) -> None:
        """Map memory; a number that is known gets other memory."""
        memory = AnonymousMemory.received(descriptor, size)
        try:
            self._mapped[number] = np.frombuffer(memory.target, np.uint8)
        finally:
            memory.close()

    def gathered(self, number: int, spans: Iterable[Span], size: int) -> Bytes:
        """A copy of the bytes in these spans, ``size`` together. ``ProtocolError`` if the memory does not have them."""
        shared = self._of(number)
        parts = [shared[first:last] for first, last in spans if 0 <= first <= last <= shared.size]
        if sum(part.size for part in parts) != size:
            raise ProtocolError(f"an entry of {size} bytes is not in the memory that is shared")
        copied = np.empty(size, np.uint8)
        copy_all(copied, parts)
        return copied

    def put(self, number: int, content: Buffer) -> None:
        """Copy an entry into memory. ``ProtocolError`` if that is too small."""
        shared, found = self._of(number), np.frombuffer(content, np.uint8)
        if found.size > shared.size:
            raise ProtocolError(f"an entry of {found.size} bytes does not fit into shared memory of {shared.size}")
        copy_all(shared[: found.size], [found])

    def _of(self, number: int) -> Bytes:
        if number not in self._mapped:
            raise ProtocolError(f"memory {number} is not shared")
        return self._mapped[number]


def copy_all(target: Bytes, parts: Sequence[Bytes]) -> None:
    """Copy parts one after the other, by several threads if they are large."""
    pieces, at = list[tuple[Bytes, Bytes]](), 0
    for part in parts:
        for start in range(0, part.size, _PIECE):
            piece = part[start : start + _PIECE]
            pieces.append((target[at : at + piece.size], piece))
            at += piece.size
    if target.size > _PIECE:
        list(POOL.map(np.copyto, *zip(*pieces, strict=True)))
    else:
        for there, piece in pieces:
            np.copyto(there, piece)
