"""The staging ring: slots in shared memory that a training process fills and its node worker empties.

The memory is an anonymous file (memfd): it is shared by handing over the descriptor, and it is gone when the last of the two
processes is, however it died. Which slot is free is said in messages, not in the memory.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from ..storage.kernels import Bytes

SLOT = 4 << 20
"""Bytes of a slot, and so of the largest chunk that is staged through it."""

ALIGN = 64
"""Chunks begin at multiples of this many bytes in a slot."""


class Ring:
    """``slots`` slots of ``SLOT`` bytes. Pages take memory from their first use on, and are reused from then on."""

    def __init__(self, fd: int, slots: int) -> None:
        self.fd, self.slots = fd, slots
        self._map = mmap.mmap(fd, slots * SLOT)
        self._bytes = np.frombuffer(self._map, np.uint8)

    @staticmethod
    def create(size: int) -> Ring:
        """A ring of about ``size`` bytes, at least two slots."""
        slots = max(2, size // SLOT)
        fd = os.memfd_create("raystow-ring", os.MFD_CLOEXEC)
        os.ftruncate(fd, slots * SLOT)
        return Ring(fd, slots)

    def slot(self, index: int) -> Bytes:
        """The bytes of one slot."""
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} of {self.slots}")
        return self._bytes[index * SLOT : (index + 1) * SLOT]

    def close(self) -> None:
        """Give the memory back. Views that are still held keep the mapping until they go."""
        os.close(self.fd)
        del self._bytes
        try:
            self._map.close()
        except BufferError:
            pass  # a chunk is being read this moment: its view closes the mapping when it goes
