"""The staging ring: slots in shared memory that a training process fills and its node worker empties.

The memory is an anonymous file (memfd), shared by passing its descriptor. The kernel frees it when both processes have ended, for
any reason. Messages tell which slots are free.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable

import numpy as np

from ...state.chunk_info import HOST_CHUNK
from ...storage.coding.kernels import Bytes
from ..protocol.messages import Span

SLOT = HOST_CHUNK
"""Bytes of a slot in a ring for tensors in host memory."""

DEVICE_SLOT = 32 << 20
"""Bytes of a slot in a ring that a GPU fills with coded chunks: few large copies."""

WORKING = 1 << 30
"""Bytes of a large ring in which versions never stay: all that is on its way from a GPU at a time fits there."""

SlotPart = tuple[int, int, int]
"""Slot, start in the slot, bytes."""

ALIGN = 64
"""Chunks begin at multiples of this many bytes in a slot."""


def slot_size(ring: int, *, gpu: bool) -> int:
    """Return the slot size for a ring of ``ring`` bytes, such that it has several slots."""
    return max(SLOT, min(DEVICE_SLOT, ring // 16)) if gpu else SLOT


def one_version(state: int) -> int:
    """Return the bytes that a version of a state of ``state`` bytes takes, if at most 7/8 of the state are stored. Of float32
    tensors .84 are; where more are stored, the rest is copied."""
    return state * 7 // 8


class Ring:
    """``slots`` consecutive slots of ``slot_size`` bytes in ``memory``. Pages are allocated at their first use.

    ``skip``: slots of the file before these. ``kept``: the most slots, any of them, that keep versions after their upload.
    """

    def __init__(self, fd: int, slots: int, slot_size: int, *, skip: int = 0, kept: int = 0) -> None:
        self.fd, self.slots, self.slot_size, self.kept = fd, slots, slot_size, kept
        self._map = mmap.mmap(fd, slots * slot_size, offset=skip * slot_size)
        self.memory = np.frombuffer(self._map, np.uint8)

    @staticmethod
    def create(size: int, slot_size: int = SLOT, *, keep: int = 0) -> Ring:
        """Create a ring of about ``size`` bytes, with at least two slots, and more to keep versions of ``keep`` bytes."""
        slots, kept = max(2, size // slot_size), -(-keep // slot_size)
        if kept:
            slots = max(slots, kept + min(slots, WORKING // slot_size))
        fd = os.memfd_create("raystow-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, slots * slot_size)
        return Ring(fd, slots, slot_size, kept=kept)

    def behind(self, slot: int) -> Ring:
        """Return the slots from ``slot`` as a ring on the same memory. The slot size must be a multiple of the page size."""
        return Ring(os.dup(self.fd), self.slots - slot, self.slot_size, skip=slot)

    def slot(self, index: int) -> Bytes:
        """Return the bytes of a slot."""
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} of {self.slots}")
        return self.memory[index * self.slot_size : (index + 1) * self.slot_size]

    def spans(self, parts: Iterable[SlotPart]) -> tuple[Span, ...]:
        """Return where parts are in the memory; parts that follow each other there are one span."""
        spans = list[Span]()
        for slot, at, size in parts:
            start = slot * self.slot_size + at
            first = spans.pop()[0] if spans and spans[-1][1] == start else start
            spans.append((first, start + size))
        return tuple(spans)

    def discard(self, slots: Iterable[int]) -> None:
        """Free the memory of slots; they are zero afterwards. The slot size must be a multiple of the page size."""
        for slot in slots:
            self._map.madvise(mmap.MADV_REMOVE, slot * self.slot_size, self.slot_size)

    def close(self) -> None:
        """Free the memory. Existing views keep it mapped until they are garbage-collected."""
        os.close(self.fd)
        mapping = self._map
        del self.memory, self._map  # references to this object must not keep the memory
        try:
            mapping.close()
        except BufferError:
            pass  # views exist; the mapping is closed with the last one
