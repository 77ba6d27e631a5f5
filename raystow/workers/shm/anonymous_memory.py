"""Memory that processes of a node share: an anonymous file, which they pass to each other by its descriptor."""

from __future__ import annotations

import fcntl
import mmap
import os

from ...storage.errors import ProtocolError


class AnonymousMemory:
    """``descriptor`` is closed with it. Views stay valid."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size, self.descriptor = size, descriptor

    @staticmethod
    def received(descriptor: int, size: int) -> AnonymousMemory:
        """Take over a descriptor from another process, and seal the memory: if that process made it smaller, a read of a mapping
        would kill this process. ``ProtocolError`` if the memory has another size or cannot be sealed."""
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        except OSError as error:
            os.close(descriptor)
            raise ProtocolError(f"{size} bytes came in memory that cannot be sealed: {error}") from error
        found = os.fstat(descriptor).st_size
        if found != size:
            os.close(descriptor)
            raise ProtocolError(f"{size} bytes came in memory of {found}")
        return AnonymousMemory(descriptor, size)

    @staticmethod
    def empty(size: int) -> AnonymousMemory:
        """Memory that is to be filled. Its pages are allocated at their first use."""
        descriptor = os.memfd_create("raystow-memory", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        return AnonymousMemory(descriptor, size)

    def grow(self, size: int) -> None:
        """Make it larger. Views of it stay what they are."""
        os.ftruncate(self.descriptor, size)
        self.size = size

    @property
    def target(self) -> memoryview:
        """A new mapping of all of it, to be filled."""
        return memoryview(mmap.mmap(self.descriptor, self.size))[: self.size]

    @property
    def content(self) -> memoryview:
        """A new mapping of all of it. The memory stays as long as somebody looks at it."""
        return self.target.toreadonly()

    def lend(self) -> int:
        """A descriptor, for the caller to close."""
        return os.dup(self.descriptor)

    def close(self) -> None:
        """Let go of the memory."""
        descriptor, self.descriptor = self.descriptor, -1
        os.close(descriptor)
