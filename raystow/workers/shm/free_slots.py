"""The slots of a ring that a training process may fill, and that its node worker empties."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Sequence

from ...storage.errors import ClusterError
from ..protocol.messages import Message, SlotsFilled
from .ring import Ring

_WAIT = 0.02  # seconds that ``take_soon`` waits
_CLOSED = -1  # comes before all slots

DIED = "the node worker of this rank died"


class FreeSlots:
    """All slots of ``ring`` are free at first. ``post`` sends to the node worker; ``freed`` and ``close`` may be called from any
    thread. The first free slot is taken: memory is allocated for as many as are in use at a time, not for all in turn."""

    def __init__(self, ring: Ring, post: Callable[[Message], None]) -> None:
        self.ring, self._post, self._waited = ring, post, 0.0
        self._free: queue.PriorityQueue[int] = queue.PriorityQueue()
        for slot in range(ring.slots):
            self._free.put(slot)

    def freed(self, slots: Iterable[int]) -> None:
        """Note that the node worker no longer needs some slots."""
        for slot in slots:
            self._free.put(slot)

    def close(self) -> None:
        """Let every later ``take`` raise ``ClusterError``: the node worker is gone."""
        self._free.put(_CLOSED)

    @property
    def free(self) -> int:
        """Bytes of the slots that can be taken at once."""
        return self._free.qsize() * self.ring.slot_size

    def take_soon(self) -> int | None:
        """Return a free slot; None after a moment without one. Raises what ``on_wait`` raises."""
        try:
            slot = self._free.get(timeout=_WAIT)
        except queue.Empty:
            self._waited += _WAIT
            self.on_wait(self._waited)
            return None
        if slot == _CLOSED:
            self._free.put(_CLOSED)
            raise ClusterError(DIED)
        self._waited = 0.0
        return slot

    def take(self) -> int:
        """Return a free slot; wait for one."""
        while (slot := self.take_soon()) is None:
            pass
        return slot

    def release(self, slots: Sequence[int]) -> None:
        """Announce that nothing more comes into some slots. They are free again when the node worker no longer needs them."""
        self._post(SlotsFilled(tuple(slots)))

    def on_wait(self, seconds: float) -> None:
        """Called again and again while no slot is free, with the time since one was."""
