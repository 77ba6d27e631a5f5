"""The step journal of a training process in a trial, without an optimizer: the bytes of an entry follow from its description."""

from __future__ import annotations

import queue

import numpy as np

from raystow.storage.coding.digest import stored_digest
from raystow.storage.errors import ClusterError
from raystow.workers.journal.client import JournalClient
from raystow.workers.protocol.coordinator_client import CoordinatorClient
from raystow.workers.protocol.messages import EntryInfo, EntryKept, JoinRun, JournalVote, OpenJournal
from raystow.workers.shm.ring import Ring

EVERY = 2
"""Steps of a segment."""
_SIZE, _SLOT, _PATIENCE = 4000, 1024, 60.0


class TrialJournal:
    """A journal that replays at construction, like ``Journal.replay``.

    ``member``: the rank and its process. ``base``: the restored step.

    Attributes:
        step: The last step that was replayed or recorded.
        whole: Whether all replayed entries had the expected bytes.
        generation: Token of the entries that it records.
    """

    def __init__(self, opening: OpenJournal, address: str, coordinator: CoordinatorClient, member: JoinRun, base: int) -> None:
        self._opening, self._world_size = opening, member.world_size
        self._client = JournalClient(address, opening, Ring.create(4 * _SLOT, _SLOT))
        vote = (member.rank, member.world_size, member.incarnation, 1, _PATIENCE, base)
        choice = coordinator.ask(JournalVote(*vote))
        places = [place for place in choice.entries if base < place.info.step <= choice.step]
        self.whole = all(self._client.fetch(place, 0) == content(place.info) for place in places)
        self.step = choice.step
        self._lineage = coordinator.ask(JournalVote(*vote, reached=choice.step)).lineage
        self.generation = self._lineage[-1].token

    def record(self, last: int) -> str:
        """Record the steps up to ``last``; return the reason of a failure, or an empty text."""
        kept: queue.SimpleQueue[EntryKept] = queue.SimpleQueue()
        for step in range(self.step + 1, last + 1):
            opening = self._opening
            info = EntryInfo(opening.repository, opening.rank, self._world_size, step, self.step, self._lineage, _SIZE)
            try:
                self._client.begin(info, _SIZE).copy(np.frombuffer(content(info), np.uint8))
                self._client.keep(info, kept.put)
            except ClusterError as error:
                return str(error)
            if problem := kept.get(timeout=_PATIENCE).problem:
                return problem
            self.step = step
        return ""


def content(info: EntryInfo) -> bytes:
    """Return the bytes of an entry, which differ for each rank, step and generation."""
    return (stored_digest(info.key.encode()) * _SIZE)[:_SIZE]
