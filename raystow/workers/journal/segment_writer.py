"""Stores the entries of one rank in segments, which the coordinator makes durable when all ranks have stored theirs.

A segment ends at each multiple of ``every`` steps, so that all ranks end it at the same one. If a rank cannot store its entries,
the next segment has them, too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ...storage.errors import ClusterError, Damaged, RaystowError
from ...storage.format import keys
from ...storage.log import about
from ...storage.object_store import ObjectStore
from ..protocol.coordinator_client import CoordinatorClient
from ..protocol.messages import EntryInfo, EntryPlace, OpenJournal, OpenSegment, SegmentStored
from ..thread_priority import give_way
from .entry_bytes import entry_digest
from .entry_store import EntryStore

logger = logging.getLogger(__name__)

_LONGEST = 30.0  # seconds between two questions to the coordinator


RepositoryEnds = tuple[ObjectStore, CoordinatorClient]
"""The store and the coordinator of a repository."""


class SegmentWriter:
    """``step`` and ``run`` are called by one thread, the others by any. ``pause``: seconds after which the coordinator is asked
    again while other ranks store their entries; longer each time."""

    def __init__(
        self, memory: EntryStore, opening: OpenJournal, open_repository: Callable[[], RepositoryEnds], *, pause: float = 0.5
    ) -> None:
        self._pause = pause
        self._memory, self._every, self._open_repository = memory, opening.durable_every, open_repository
        self._log = about(logger, repository=opening.uri, rank=opening.rank)
        self._newest: EntryInfo | None = None  # the last entry of the next segment
        self._done: EntryInfo | None = None  # the last one that needs nothing more
        self._stored: tuple[EntryInfo, int] | None = None  # the newest entry when entries were stored last, up to which step
        self._woken, self._closed = threading.Event(), False

    def kept(self, info: EntryInfo) -> None:
        """Take notice of a new entry."""
        if info.step // self._every > max(info.previous, 0) // self._every:
            self._newest = info
            self._woken.set()

    def close(self) -> None:
        """Let ``run`` return when all is stored that can be."""
        self._closed = True
        self._woken.set()

    def run(self) -> bool:
        """Call ``step``, and wait until there may be something to do. Returns False after ``close``."""
        give_way()
        if not self._closed:
            self._woken.wait()
        self._woken.clear()
        pause = self._pause
        while self.step() and not self._closed:
            self._woken.wait(pause)
            self._woken.clear()
            pause = min(2 * pause, _LONGEST)
        return not self._closed

    def step(self) -> bool:
        """Store a segment's entries; return whether it must be tried again. A failure is logged only: the next one has them."""
        newest = self._newest
        if newest is None or newest is self._done:
            return False
        again = False
        try:
            again = self._store(newest)
        except RaystowError as error:
            self._log.warning("steps up to %d are not durable yet: %s", newest.step, error, extra={"step": newest.step})
        finally:
            if not again:
                self._done = newest
        return self._newest is not self._done

    def _store(self, newest: EntryInfo) -> bool:
        store, coordinator = self._open_repository()
        ticket = coordinator.ask(OpenSegment(newest))
        self._memory.stored(newest, ticket.after)
        if not ticket.number:
            return ticket.after < newest.step
        if self._stored == (newest, ticket.step):  # it was not committed: the next segment has these steps
            return False
        infos = [info for info in self._memory.descent(newest, ticket.after) if info.step <= ticket.step]
        views = [view for info in infos if (view := self._memory.view(info)) is not None]
        if not infos or len(views) < len(infos) or infos[0].previous > ticket.after:
            raise ClusterError(f"this node has not all entries after step {ticket.after}")
        for info, view in zip(infos, views, strict=True):
            if entry_digest(view) != info.digest:
                raise Damaged("it does not have its digest in this node's memory", subject=f"entry of step {info.step}")
        store.put(keys.segment_entries(ticket.number, ticket.attempt, newest.rank), views)
        coordinator.ask(SegmentStored(ticket.number, ticket.attempt, newest.rank, tuple(infos)))
        self._stored = newest, ticket.step
        return True


def read_entry(store: ObjectStore, place: EntryPlace, target: memoryview) -> None:
    """Fill ``target`` with an entry that the store has. Raises ``Damaged`` if it does not have its digest."""
    stored = place.stored
    assert stored is not None
    key = keys.segment_entries(stored.number, stored.attempt, stored.rank)
    store.get_range_into(key, stored.start, target)
    if entry_digest(target) != place.info.digest:
        raise Damaged(f"the entry at byte {stored.start} does not have its digest", subject=key)
