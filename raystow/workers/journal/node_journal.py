"""The journal as its node worker sees it: entries in memory, their copies, and the training processes that record them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Protocol

from ...storage import background
from ...storage.clock import Clock
from ...storage.errors import ClusterError, RaystowError
from ...storage.metrics import JOURNAL_MEMORY, record
from ..protocol.messages import (
    EntryInfo,
    EntryKept,
    FetchedEntry,
    FetchEntry,
    KeepEntry,
    OpenJournal,
    PutEntry,
    SaveBegun,
    shortened,
)
from ..protocol.unix_channel import Connection
from .entry_memory import EntryMemory
from .entry_replicator import EntryPeers, EntryReplicator
from .entry_store import EntryStore

logger = logging.getLogger(__name__)


class EntryReader(Protocol):
    """Reads from the memory of other nodes."""

    def read(self, node: str, repository: str, key: str, start: int, target: memoryview) -> bool:
        """Fill ``target`` with an object's bytes from ``start``; return whether the node has them."""


class NodeJournal:
    """Thread-safe. ``budget``: bytes for entries, unless a training process asks for another one."""

    def __init__(self, node: str, budget: int, reader: EntryReader, peers: EntryPeers, clock: Clock) -> None:
        self._node, self._budget, self._reader = node, budget, reader
        self.store, self._memory = EntryStore(budget), clock.token()
        self._replicator = EntryReplicator(node, self.store, peers, clock)
        background.repeat("raystow-entries", self._replicator.run)

    def committed(self, repository: str, step: int) -> None:
        """Drop the entries up to the step of a version that is durable now."""
        self.store.committed(repository, step)

    def serve(self, connection: Connection, opening: OpenJournal) -> None:
        """Handle the messages of a training process until it goes away."""
        self.store.budget = self._budget if opening.budget is None else opening.budget
        self._replicator.want(opening.repository, opening.replicas)
        while (received := connection.receive(KeepEntry, SaveBegun, FetchEntry)) is not None:
            message, descriptor = received
            match message:
                case KeepEntry(info) if descriptor is not None:
                    self._keep(connection, info, EntryMemory.received(descriptor, info.size))
                case SaveBegun(step):
                    self.store.save_begun(opening.repository, step)
                case FetchEntry(info, nodes):
                    self._fetch(connection, info, nodes)

    def offered(self, put: PutEntry) -> EntryKept:
        """Whether a copy of another node's entry is here, or can be kept."""
        self.store.drop_before(put.info, put.oldest)
        if self.store.has(put.info):
            return EntryKept(put.info.step, 1, memory=self._memory)
        return EntryKept(put.info.step, 0, shortened(self.store.problem(put.info)), self._memory)

    def receive(self, put: PutEntry, fill: Callable[[memoryview], None]) -> EntryKept:
        """Keep a copy of another node's entry, whose bytes ``fill`` writes."""
        memory = EntryMemory.empty(put.info.size)
        fill(memory.target)
        problem = self.store.add(put.info, memory, own=False)
        return EntryKept(put.info.step, 1, shortened(problem), self._memory)

    def lend(self, repository: str, key: str) -> int | None:
        """Return a descriptor of an entry's memory, for the caller to close; None if it is not here."""
        return self.store.lend(repository, key)

    def close(self) -> None:
        """Let go of everything."""
        self._replicator.close()
        self.store.close()

    def _keep(self, connection: Connection, info: EntryInfo, memory: EntryMemory) -> None:
        problem = self.store.add(info, memory, own=True)
        record(JOURNAL_MEMORY, self.store.used, node=self._node)
        if problem:
            connection.send(EntryKept(info.step, 0, shortened(problem)))
        else:
            self._replicator.submit(info, lambda kept: _tell(connection, kept))

    def _fetch(self, connection: Connection, info: EntryInfo, nodes: tuple[str, ...]) -> None:
        """Answer with an entry, from here or another node; it stays here, so that it has as many copies as a new one."""
        memory = self.store.lend(info.repository, info.key)
        problem = ""
        if memory is None:
            try:
                problem = self._copy(info, [node for node in nodes if node != self._node])
            except RaystowError as error:
                problem = str(error)
            memory = self.store.lend(info.repository, info.key)
        else:
            self.store.claim(info)
        self._replicator.wake()
        if memory is None:
            connection.send(FetchedEntry(shortened(problem or "it was dropped")))
            return
        try:
            connection.send(FetchedEntry(), fd=memory)
        finally:
            os.close(memory)

    def _copy(self, info: EntryInfo, nodes: list[str]) -> str:
        """Copy an entry from another node; return why it cannot be kept here."""
        reasons = list[str]()
        for node in nodes:
            memory = EntryMemory.empty(info.size)
            try:
                if self._reader.read(node, info.repository, info.key, 0, memory.target):
                    return self.store.add(info, memory, own=True)
                reasons.append(f"node {node} has dropped it")
            except ClusterError as error:
                reasons.append(str(error))
            memory.close()
        raise ClusterError(f"no node has it: {'; '.join(reasons)}", subject=f"entry of step {info.step}")


def _tell(connection: Connection, kept: EntryKept) -> None:
    try:
        connection.send(kept)
    except RaystowError:
        pass  # the process is gone
