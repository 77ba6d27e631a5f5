"""Hands entries over to the node worker while they are made: through a ring that both processes map, and that it empties.

The slots of the ring are filled by copies of a GPU or by this process. The node worker gives a slot back when it has copied all
bytes in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from ...storage.coding.kernels import Bytes
from ...storage.errors import ClusterError
from ..protocol.messages import AppendEntry, BeginEntry, EntryInfo, Message
from ..shm.free_slots import FreeSlots
from ..shm.ring import DEVICE_SLOT, Ring, SlotPart
from .entry_bytes import copy_all

_SLOTS = 16


def entry_ring() -> Ring:
    """A ring for the entries of a training process."""
    return Ring.create(_SLOTS * DEVICE_SLOT, DEVICE_SLOT)


class EntryWriter(FreeSlots):
    """Writes one entry after the other. For one thread.

    Args:
        patience: Seconds within which the node worker must have emptied a slot.

    Attributes:
        size: Bytes of the entry so far; -1 before the first.
    """

    def __init__(self, ring: Ring, post: Callable[[Message], None], *, patience: float = 10.0) -> None:
        super().__init__(ring, post)
        self._patience = patience
        self.size = -1
        self._slot, self._used = -1, ring.slot_size  # for bytes of this process
        self._copied: list[SlotPart] = []  # not handed over yet

    def begin(self, info: EntryInfo, most: int) -> None:
        """Begin an entry of at most ``most`` bytes. ``info``: without the size."""
        self._post(BeginEntry(info, most))
        self.size = 0
        self._copied.clear()

    def end(self) -> int:
        """End the entry; return how many bytes were handed over, -1 if it was begun with another node worker."""
        self.flush()
        size, self.size = self.size, -1
        return size

    def release(self, slots: Sequence[int]) -> None:
        """Note that all bytes in some slots were handed over."""
        with contextlib.suppress(ClusterError):  # ``take`` raises it
            super().release(slots)

    def on_wait(self, seconds: float) -> None:
        """Raise ``ClusterError`` if the node worker empties no slot."""
        if seconds > self._patience:
            raise ClusterError(f"the node worker has not copied parts of an entry in {self._patience:.0f} s")

    def add(self, parts: Sequence[SlotPart]) -> int:
        """Hand over the next bytes of the entry, which are in the ring; return where they begin."""
        self.flush()
        return self._hand_over(parts)

    def copy(self, content: Bytes) -> int:
        """Copy the next bytes of the entry; return where they begin. ``flush`` hands them over."""
        start = self.size + sum(size for _, _, size in self._copied)
        while content.size:
            if self._used == self.ring.slot_size:
                self.flush()
                self._slot, self._used = self.take(), 0
            part = content[: self.ring.slot_size - self._used]
            copy_all(self.ring.slot(self._slot)[self._used : self._used + part.size], [part])
            self._copied.append((self._slot, self._used, part.size))
            self._used += part.size
            content = content[part.size :]
        return start

    def flush(self) -> None:
        """Hand over what was copied."""
        copied, self._copied = self._copied, []
        if copied:
            self._hand_over(copied)
        if self._slot >= 0:
            self.release([self._slot])
        self._slot, self._used = -1, self.ring.slot_size

    def _hand_over(self, parts: Sequence[SlotPart]) -> int:
        start = self.size
        self.size += sum(size for _, _, size in parts)
        self._post(AppendEntry(self.ring.spans(parts)))
        return start
