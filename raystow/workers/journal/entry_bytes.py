"""The bytes of entries in a node worker, on their way from and to training processes.

Both processes map the same memory, which is used again for later entries: its pages are there, and mapped. The node worker copies
entries into memory of its own, for which the system may give huge pages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from blake3 import blake3

from ...storage.coding.kernels import Bytes
from ...storage.errors import ProtocolError
from ...storage.object_store import Buffer
from ..protocol.messages import Span
from ..shm.anonymous_memory import AnonymousMemory

_PIECE = 8 << 20  # bytes that a thread copies at a time

POOL = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "raystow-entry")
"""Threads that copy and decode the bytes of entries, without the interpreter lock."""


def entry_digest(content: Buffer) -> bytes:
    """BLAKE3 of an entry, by several threads."""
    return blake3(content, max_threads=blake3.AUTO).digest()


class ArrivingEntry:
    """An entry that a training process hands over part by part.

    Args:
        most: The most bytes that it can have.
        refused: Returns why an entry of so many bytes cannot be kept, else an empty text. The rest is not copied then.

    Attributes:
        size: Bytes that have arrived.
        problem: Why the entry is not kept.
    """

    def __init__(self, most: int, refused: Callable[[int], str] = lambda size: "") -> None:
        self._bytes, self._most, self._refused = np.empty(most, np.uint8), most, refused  # pages are allocated at their first use
        self.size, self.problem = 0, ""

    def append(self, parts: Sequence[Bytes]) -> None:
        """Copy the next bytes, unless the entry is refused."""
        first, self.size = self.size, self.size + sum(part.size for part in parts)
        if self.size > self._most:
            raise ProtocolError(f"{self.size} bytes of an entry arrive, at most {self._most} were announced")
        self.problem = self.problem or self._refused(self.size)
        if self.problem:
            self._bytes = np.empty(0, np.uint8)
        else:
            copy_all(self._bytes[first : self.size], parts)

    def content(self) -> memoryview:
        """The bytes of an entry without a problem. There is no more to come."""
        self._bytes.resize(self.size, refcheck=False)  # gives back the pages behind it
        return self._bytes.data


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

    def keep_only(self, number: int) -> None:
        """Unmap the memory with other numbers."""
        self._mapped = {known: mapped for known, mapped in self._mapped.items() if known == number}

    def parts(self, number: int, spans: Iterable[Span]) -> list[Bytes]:
        """The bytes in these spans. ``ProtocolError`` if the memory does not have them."""
        shared, found = self._of(number), list[Bytes]()
        for first, last in spans:
            if not 0 <= first <= last <= shared.size:
                raise ProtocolError(f"the bytes {first} to {last} of an entry are not in the memory that is shared")
            found.append(shared[first:last])
        return found

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
