"""The journal's connections in a Ray cluster: to this node's worker and to the coordinator."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ...storage.errors import ClusterError
from ...workers.journal.client import JournalClient
from ...workers.journal.entry_writer import EntryWriter, entry_ring
from ...workers.protocol.messages import (
    START,
    EntryInfo,
    EntryKept,
    EntryPlace,
    Generation,
    JournalChoice,
    JournalVote,
    OpenJournal,
    RankReading,
)

_SAVES = 16  # newest saves of which one may still be under way or durable; older ones do not matter


class JournalPort:
    """Methods raise ``ClusterError`` if the other end does not answer.

    Args:
        address: Returns that of this node's worker. It is called again if the worker has died.
        settle: Sends a vote to the coordinator, and waits for its choice.
        reading: Tells the coordinator that this rank replays on; does not wait for an answer.
    """

    def __init__(
        self,
        opening: OpenJournal,
        address: Callable[[], str],
        *,
        settle: Callable[[JournalVote], JournalChoice],
        reading: Callable[[RankReading], None],
    ) -> None:
        self._opening, self._address, self._settle, self.reading = opening, address, settle, reading
        self._lock = threading.Lock()
        self._client: JournalClient | None = None
        self._ring = entry_ring()
        self._single = START  # the newest step whose entry is only on this node
        self._saves = deque[int](maxlen=_SAVES)  # the steps of the newest saves that have not failed

    def begin(self, info: EntryInfo, most: int) -> EntryWriter:
        """Begin an entry of at most ``most`` bytes; return what writes it. ``info``: without the size."""
        return self._connected().begin(info, most)

    def keep(self, info: EntryInfo, on_kept: Callable[[EntryKept], None]) -> None:
        """Keep the entry that was begun. ``on_kept`` is called from another thread."""

        def kept(answer: EntryKept) -> None:
            if not answer.copies and not answer.problem:
                self._single = answer.step
            on_kept(answer)

        self._connected().keep(info, kept)

    def save_begun(self, step: int, generation: Generation) -> None:
        """Tell that a save of the state after a step is under way. ``generation``: of the entries that are recorded now."""
        with self._lock:
            self._saves.append(step)
        self._connected().save_begun(step, generation)

    def save_failed(self, step: int) -> None:
        """Tell that a save that had begun has failed, so that entries up to its step are needed."""
        with self._lock:
            if step in self._saves:
                self._saves.remove(step)
            client = self._client
        if client is not None and not client.lost:  # a node worker that was restarted does not know of the save
            client.save_failed(step)

    def fetch(self, place: EntryPlace, number: int) -> memoryview:
        """Return the bytes of an entry, which this rank's node keeps from then on. They are valid until the next call with
        ``number``, or of ``begin``."""
        return self._connected().fetch(place, number)

    def settle(self, vote: JournalVote) -> JournalChoice:
        """Agree with the other ranks on the step to replay to; waits for them."""
        with self._lock:
            self._saves.clear()
            self._saves.append(vote.base)
            self._single = START
        return self._settle(vote)

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None
            self._ring.close()

    def _connected(self) -> JournalClient:
        with self._lock:
            if self._client is not None and self._client.lost:
                self._client.close()
                self._client = None
                single, self._single = self._single, START
                if single > max(self._saves, default=START):
                    raise ClusterError(f"the node worker has died, which alone had the entries up to step {single}")
            if self._client is None:
                self._client = JournalClient(self._address(), self._opening, self._ring)
            return self._client
