"""A training process's connection to the journal of its node."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence

from ...storage import background
from ...storage.errors import ClusterError, ProtocolError
from ...storage.log import about
from ...storage.object_store import Buffer
from ..protocol.messages import (
    EntryInfo,
    EntryKept,
    EntryPlace,
    FetchedEntry,
    FetchEntry,
    KeepEntry,
    OpenJournal,
    SaveBegun,
)
from ..protocol.unix_channel import Connection
from .entry_memory import EntryMemory, SpareMemory

logger = logging.getLogger(__name__)

_PATIENCE = 120.0  # seconds within which an entry must have been fetched


class JournalClient:
    """One thread keeps entries, and one fetches them. ``ClusterError`` if the node worker is gone."""

    def __init__(self, address: str, opening: OpenJournal) -> None:
        self._log = about(logger, repository=opening.uri, rank=opening.rank)
        self._connection = Connection.connect(address)
        self._connection.send(opening)
        self._lock = threading.Lock()
        self._waiting: dict[int, Callable[[EntryKept], None]] = {}
        self._fetched: queue.SimpleQueue[tuple[FetchedEntry, int | None] | None] = queue.SimpleQueue()
        self._spare, self.lost = SpareMemory(), False
        self._thread = background.start("raystow-journal-answers", self._listen)

    def keep(self, info: EntryInfo, parts: Sequence[Buffer], on_kept: Callable[[EntryKept], None]) -> None:
        """Copy an entry to shared memory, and hand that over. ``on_kept`` is called from another thread."""
        memory = self._spare.take(info.size)
        try:
            memory.fill(parts)
            with self._lock:
                if self.lost:
                    raise ClusterError("the node worker of this rank died")
                self._waiting[info.step] = on_kept
            descriptor = memory.lend()
            try:
                self._connection.send(KeepEntry(info), fd=descriptor)
            finally:
                os.close(descriptor)
        except ClusterError:
            with self._lock:
                self._waiting.pop(info.step, None)
            raise
        finally:
            memory.close()

    def save_begun(self, step: int) -> None:
        """Tell that a save of the state after a step is under way."""
        self._connection.send(SaveBegun(step))

    def fetch(self, place: EntryPlace) -> memoryview:
        """Return the bytes of an entry, which the node keeps from then on."""
        self._connection.send(FetchEntry(place))
        try:
            answer = self._fetched.get(timeout=_PATIENCE)
        except queue.Empty:
            raise ClusterError(f"no entry after {_PATIENCE:.0f} s", subject=f"entry of step {place.info.step}") from None
        if answer is None:
            self._fetched.put(None)
            raise ClusterError("the node worker of this rank died")
        fetched, descriptor = answer
        if descriptor is None:
            raise ClusterError(f"is not in memory any more: {fetched.problem}", subject=f"entry of step {place.info.step}")
        memory = EntryMemory.received(descriptor, place.info.size)
        content = memory.content
        memory.close()
        return content

    def close(self) -> None:
        """Close the connection; the node keeps the entries."""
        self._connection.close()
        self._thread.join()
        self._spare.close()

    def _listen(self) -> None:
        try:
            received: tuple[EntryKept | FetchedEntry, int | None] | None
            while (received := self._connection.receive(EntryKept, FetchedEntry)) is not None:
                message, descriptor = received
                if isinstance(message, FetchedEntry):
                    self._fetched.put((message, descriptor))
                else:
                    with self._lock:
                        on_kept = self._waiting.pop(message.step, None)
                    if on_kept is not None:
                        on_kept(message)
        except Exception as error:
            trace = not isinstance(error, ProtocolError)
            self._log.error("the connection to the node's journal is closed: %s", error, exc_info=trace)
            self._connection.shut()
        with self._lock:
            self.lost = True
            waiting, self._waiting = dict(self._waiting), {}
        self._fetched.put(None)
        for step, on_kept in waiting.items():
            on_kept(EntryKept(step, 0, "the node worker of this rank died"))
