"""What a journal needs of its node worker and of the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ...storage.coding.kernels import Bytes
from ...storage.object_store import Buffer
from ...workers.protocol.messages import EntryInfo, EntryKept, EntryPlace, JournalChoice, JournalVote


class JournalPort(Protocol):
    """Methods raise ``ClusterError`` if the other end does not answer."""

    def begin(self) -> Callable[[int], Bytes]:
        """Begin an entry; return a function that returns memory for so many bytes of it. Waits until the node does not
        need the entry that was there."""

    def keep(self, info: EntryInfo, parts: Sequence[Buffer], on_kept: Callable[[EntryKept], None]) -> None:
        """Hand over the entry that was begun. Parts that are not in its memory are copied there. ``on_kept`` is called from
        another thread."""

    def save_begun(self, step: int) -> None:
        """Tell that a save of the state after a step is under way."""

    def fetch(self, place: EntryPlace, number: int) -> memoryview:
        """Return the bytes of an entry, which this rank's node keeps from then on. They are valid until the next call with
        ``number``, or of ``begin``."""

    def settle(self, vote: JournalVote) -> JournalChoice:
        """Agree with the other ranks on the step to replay to; waits for them."""

    def close(self) -> None:
        """Close the connections."""
