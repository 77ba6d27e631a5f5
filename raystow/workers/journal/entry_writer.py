"""Hands entries over to the node worker while they are made: through a ring that both processes map, and that it empties.

The slots of the ring are filled by copies of a GPU or by this process. The node worker gives a slot back when it has copied all
bytes in it.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Sequence

from ...storage.clock import SYSTEM
from ...storage.coding.kernels import Bytes
from ...storage.errors import ClusterError
from ..protocol.messages import AppendEntry, BeginEntry, Message, SlotFilled, Span
from ..shm.ring import DEVICE_SLOT, Ring, SlotPart
from .entry_bytes import copy_all

DIED = "the node worker of this rank died"

_SLOTS = 16
_WAIT = 0.02  # seconds that ``take`` waits
_PATIENCE = 10.0  # seconds within which the node worker must have emptied a slot


def entry_ring() -> Ring:
    """A ring for the entries of a training process."""
    return Ring.create(_SLOTS * DEVICE_SLOT, DEVICE_SLOT)


class EntryWriter:
    """Writes one entry after the other. For one thread, except ``freed`` and ``close``. ``post`` sends to the node worker.

    Attributes:
        size: Bytes of the entry so far; -1 before the first.
    """

    def __init__(self, ring: Ring, post: Callable[[Message], None]) -> None:
        self.ring, self._post, self.size = ring, post, -1
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        for slot in range(ring.slots):
            self._free.put(slot)
        self._slot, self._used = -1, ring.slot_size  # for bytes of this process
        self._copied: list[SlotPart] = []  # not handed over yet
        self._waiting_since = 0.0

    def begin(self, most: int) -> None:
        """Begin an entry of at most ``most`` bytes."""
        self._post(BeginEntry(most))
        self.size = 0
        self._copied.clear()

    def end(self) -> int:
        """End the entry; return how many bytes were handed over, -1 if it was begun with another node worker."""
        self.flush()
        size, self.size = self.size, -1
        return size

    def take(self) -> int | None:
        """Return a free slot; None after a moment without one. ``ClusterError`` if the node worker is gone, or empties none."""
        try:
            slot = self._free.get(timeout=_WAIT)
        except queue.Empty:
            self._waiting_since = self._waiting_since or SYSTEM.monotonic()
            if SYSTEM.monotonic() > self._waiting_since + _PATIENCE:
                raise ClusterError(f"the node worker has not copied parts of an entry in {_PATIENCE:.0f} s") from None
            return None
        if slot is None:
            self._free.put(None)
            raise ClusterError(DIED)
        self._waiting_since = 0.0
        return slot

    def release(self, slot: int) -> None:
        """Note that all bytes in a slot were handed over."""
        with contextlib.suppress(ClusterError):  # ``take`` raises it
            self._post(SlotFilled(slot))

    def freed(self, slot: int) -> None:
        """Note that the node worker has emptied a slot."""
        self._free.put(slot)

    def close(self) -> None:
        """Let every later ``take`` raise ``ClusterError``: the node worker is gone."""
        self._free.put(None)

    def add(self, parts: Sequence[SlotPart]) -> int:
        """Hand over the next bytes of the entry, which are in the ring; return where they begin."""
        self.flush()
        return self._hand_over(parts)

    def copy(self, content: Bytes) -> int:
        """Copy the next bytes of the entry; return where they begin. ``flush`` hands them over."""
        start = self.size + sum(size for _, _, size in self._copied)
        while content.size:
            if self._used == self.ring.slot_size:
                self._next_slot()
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
            self.release(self._slot)
        self._slot, self._used = -1, self.ring.slot_size

    def _hand_over(self, parts: Sequence[SlotPart]) -> int:
        start, slot_size = self.size, self.ring.slot_size
        spans = list[Span]()
        for slot, at, size in parts:
            first = slot * slot_size + at
            if spans and spans[-1][1] == first:
                first = spans.pop()[0]
            spans.append((first, slot * slot_size + at + size))
            self.size += size
        self._post(AppendEntry(tuple(spans)))
        return start

    def _next_slot(self) -> None:
        self.flush()
        while (slot := self.take()) is None:
            pass
        self._slot, self._used = slot, 0
