"""The slots of the staging ring that this process may fill."""

from __future__ import annotations

import queue
from collections.abc import Callable

from ...storage.errors import ClusterError
from ..protocol.messages import FlushPacks, Message, SlotFilled
from ..shm.ring import Ring
from .plan import SaveOrder

_WAIT = 0.02  # seconds without a free slot after which the node worker is asked to free some


class FreeSlots:
    """``order`` is the save that is being staged. ``post`` sends to the node worker; ``freed`` may be called from any thread."""

    def __init__(self, ring: Ring, post: Callable[[Message], None]) -> None:
        self.ring, self._post = ring, post
        self.order: SaveOrder | None = None
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        for slot in range(ring.slots):
            self._free.put(slot)

    def freed(self, slot: int) -> None:
        """Note that the node worker no longer needs a slot."""
        self._free.put(slot)

    def close(self) -> None:
        """Let every later ``take`` raise ``ClusterError``: the node worker is gone."""
        self._free.put(None)

    @property
    def free(self) -> int:
        """Bytes of the slots that can be taken at once."""
        return self._free.qsize() * self.ring.slot_size

    def take_soon(self) -> int | None:
        """Return a free slot; None after a moment without one, in which the node worker was asked to upload what it has.

        Raises ``SaveFailed`` if the save has failed meanwhile: chunks of other saves may occupy the slots for minutes.
        """
        try:
            slot = self._free.get(timeout=_WAIT)
        except queue.Empty:
            self._post(FlushPacks())
            if self.order is not None:
                self.order.check()
            return None
        if slot is None:
            self._free.put(None)
            raise ClusterError("the node worker died")
        return slot

    def take(self) -> int:
        """Return a free slot; wait for one."""
        while (slot := self.take_soon()) is None:
            pass
        return slot

    def release(self, slot: int) -> None:
        """Announce that nothing more comes into this slot. It is free again when the node worker no longer needs it."""
        self._post(SlotFilled(slot))

    def lend(self) -> int:
        """Leave all slots but the first few to the node worker for good. Return the first slot that it gets."""
        first = max(1, self.ring.slots // 4)
        kept, lent = list[int](), 0
        while lent < self.ring.slots - first:
            slot = self.take()
            if slot < first:
                kept.append(slot)
            else:
                lent += 1
        for slot in kept:
            self._free.put(slot)
        return first
