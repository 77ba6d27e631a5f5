"""What a journal needs of its node worker and of the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ...storage.coding.kernels import Bytes
from ...workers.protocol.messages import EntryInfo, EntryKept, EntryPlace, JournalChoice, JournalVote, RankReading
from ...workers.shm.ring import Ring, SlotPart


class EntrySink(Protocol):
    """Takes the bytes of one entry. Methods raise ``ClusterError`` if the node worker is gone. ``ring``: a GPU may copy to it."""

    ring: Ring

    def take_soon(self) -> int | None:
        """A free slot of the ring; None after a moment without one."""

    def release(self, slots: Sequence[int]) -> None:
        """Nothing more in some slots will be added."""

    def add(self, parts: Sequence[SlotPart]) -> int:
        """Add bytes that are in the ring; return where they begin in the entry."""

    def copy(self, content: Bytes) -> int:
        """Add a copy of bytes; return where they begin in the entry."""


class JournalPort(Protocol):
    """Methods raise ``ClusterError`` if the other end does not answer."""

    def begin(self, info: EntryInfo, most: int) -> EntrySink:
        """Begin an entry of at most ``most`` bytes. ``info``: without the size."""

    def keep(self, info: EntryInfo, on_kept: Callable[[EntryKept], None]) -> None:
        """Keep the entry that was begun. ``on_kept`` is called from another thread."""

    def save_begun(self, step: int, generation: str) -> None:
        """Tell that a save of the state after a step is under way. ``generation``: of the entries that are recorded now."""

    def save_failed(self, step: int) -> None:
        """Tell that a save that had begun has failed, so that entries up to its step are needed."""

    def fetch(self, place: EntryPlace, number: int) -> memoryview:
        """Return the bytes of an entry, which this rank's node keeps from then on. They are valid until the next call with
        ``number``, or of ``begin``."""

    def settle(self, vote: JournalVote) -> JournalChoice:
        """Agree with the other ranks on the step to replay to; waits for them."""

    def reading(self, rank: RankReading) -> None:
        """Tell that this rank replays on; does not wait for an answer."""

    def close(self) -> None:
        """Close the connections."""
