"""The journal's connections in a Ray cluster: to this node's worker and to the coordinator."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ...storage.errors import ClusterError
from ...workers.journal.client import JournalClient
from ...workers.journal.entry_writer import EntryWriter, entry_ring
from ...workers.protocol.coordinator_client import CoordinatorClient
from ...workers.protocol.messages import (
    START,
    EntryInfo,
    EntryKept,
    EntryPlace,
    JournalChoice,
    JournalVote,
    OpenJournal,
    RankReading,
)

_SAVES = 16  # newest saves of which one may still be under way or durable; older ones do not matter


class ClusterPort:
    """A ``JournalPort``. ``address``: returns that of this node's worker, which is asked for again if the worker has died."""

    def __init__(self, opening: OpenJournal, address: Callable[[], str], coordinator: CoordinatorClient) -> None:
        self._opening, self._address, self._coordinator = opening, address, coordinator
        self._lock = threading.Lock()
        self._client: JournalClient | None = None
        self._ring = entry_ring()
        self._single = START  # the newest step whose entry is only on this node
        self._saves = deque[int](maxlen=_SAVES)  # the steps of the newest saves that have not failed

    def begin(self, info: EntryInfo, most: int) -> EntryWriter:
        return self._connected().begin(info, most)

    def keep(self, info: EntryInfo, on_kept: Callable[[EntryKept], None]) -> None:
        def kept(answer: EntryKept) -> None:
            if not answer.copies and not answer.problem:
                self._single = answer.step
            on_kept(answer)

        self._connected().keep(info, kept)

    def save_begun(self, step: int, generation: str) -> None:
        with self._lock:
            self._saves.append(step)
        self._connected().save_begun(step, generation)

    def save_failed(self, step: int) -> None:
        with self._lock:
            if step in self._saves:
                self._saves.remove(step)
            client = self._client
        if client is not None and not client.lost:  # a node worker that was restarted does not know of the save
            client.save_failed(step)

    def fetch(self, place: EntryPlace, number: int) -> memoryview:
        return self._connected().fetch(place, number)

    def settle(self, vote: JournalVote) -> JournalChoice:
        with self._lock:
            self._saves.clear()
            self._saves.append(vote.base)
            self._single = START
        return self._coordinator.ask(vote)

    def reading(self, rank: RankReading) -> None:
        self._coordinator.send(rank)

    def close(self) -> None:
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
