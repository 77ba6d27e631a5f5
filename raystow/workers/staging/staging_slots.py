"""The slots of the staging ring that this process may fill."""

from __future__ import annotations

from ...storage.errors import SaveFailed
from ..protocol.messages import FlushPacks
from ..shm.free_slots import FreeSlots
from .plan import SaveOrder


class StagingSlots(FreeSlots):
    """``order`` is the save that is being staged."""

    order: SaveOrder | None = None

    def on_wait(self, seconds: float) -> None:
        """Ask the node worker to upload what it has. Raises ``SaveFailed`` if the save has failed meanwhile: chunks of other
        saves may occupy the slots for minutes."""
        self._post(FlushPacks())
        if self.order is not None:
            self.order.check()

    def lend(self) -> int:
        """Leave all slots but the first few to the node worker for good. Return the first slot that it gets. Raises what ``take``
        raises."""
        first = max(1, self.ring.slots // 4)
        kept, lent = list[int](), list[int]()
        try:
            while len(lent) < self.ring.slots - first:
                slot = self.take()
                (kept if slot < first else lent).append(slot)
        except SaveFailed:
            self.freed((*kept, *lent))  # for the next save
            raise
        self.freed(kept)
        return first
