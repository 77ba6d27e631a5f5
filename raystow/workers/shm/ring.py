"""The staging ring: slots in shared memory that a training process fills and its node worker empties.

The memory is an anonymous file (memfd): it is shared by handing over the descriptor, and it is gone when the last of the two
processes is, however it died. Which slot is free is said in messages, not in the memory.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from ...storage.coding.kernels import Bytes

SLOT = 4 << 20
"""Bytes of a slot in a ring for tensors in host memory, and of the largest chunk that is staged as it is."""

DEVICE_SLOT = 32 << 20
"""Bytes of a slot in a ring that a GPU fills with coded chunks: few large copies."""

ALIGN = 64
"""Chunks begin at multiples of this many bytes in a slot."""


def slot_size(ring: int, *, gpu: bool) -> int:
    """The size of slots for a ring of so many bytes: there must be a handful of them."""
    return max(SLOT, min(DEVICE_SLOT, ring // 16)) if gpu else SLOT


class Ring:
    """``slots`` slots of ``slot_size`` bytes, one behind the other in ``memory``. Pages take memory from their first use on, and
    are reused from then on. ``skip``: slots of the file before the first one of these."""

    def __init__(self, fd: int, slots: int, slot_size: int, *, skip: int = 0) -> None:
        self.fd, self.slots, self.slot_size = fd, slots, slot_size
        self._map = mmap.mmap(fd, slots * slot_size, offset=skip * slot_size)
        self.memory = np.frombuffer(self._map, np.uint8)

    @staticmethod
    def create(size: int, slot_size: int = SLOT) -> Ring:
        """A ring of about ``size`` bytes, at least two slots."""
        slots = max(2, size // slot_size)
        fd = os.memfd_create("raystow-ring", os.MFD_CLOEXEC)
        os.ftruncate(fd, slots * slot_size)
        return Ring(fd, slots, slot_size)

    def behind(self, slot: int) -> Ring:
        """The slots from ``slot`` on, as a ring of their own on the same memory. A slot must be a whole number of pages."""
        return Ring(os.dup(self.fd), self.slots - slot, self.slot_size, skip=slot)

    def slot(self, index: int) -> Bytes:
        """The bytes of one slot."""
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} of {self.slots}")
        return self.memory[index * self.slot_size : (index + 1) * self.slot_size]

    def close(self) -> None:
        """Give the memory back. Views that are still held keep the mapping until they go."""
        os.close(self.fd)
        mapping = self._map
        del self.memory, self._map  # whoever still knows this ring does not keep its memory
        try:
            mapping.close()
        except BufferError:
            pass  # a chunk is being read this moment: its view closes the mapping when it goes
