"""A node worker keeps the entries of its training processes: over a real socket, without other nodes."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import numpy as np
import pytest
from helpers.polling import wait_until
from msgspec.structs import replace

from raystow.orchestrator.journal.port import JournalPort
from raystow.storage.coding.digest import stored_digest
from raystow.storage.coding.kernels import Bytes
from raystow.storage.errors import ClusterError
from raystow.storage.runtime.clock import SYSTEM
from raystow.workers.journal import entry_bytes
from raystow.workers.journal.client import JournalClient
from raystow.workers.journal.node_journal import NodeJournal
from raystow.workers.node_peers import NodePeers
from raystow.workers.protocol.messages import (
    RECORDING,
    EntryInfo,
    EntryKept,
    EntryPlace,
    FetchEntry,
    Generation,
    OpenJournal,
)
from raystow.workers.protocol.unix_channel import Connection, Listener
from raystow.workers.shm.ring import Ring

SLOT = 16 << 10
BUDGET = 1 << 20
DATA = os.urandom(10 * SLOT + 7)
OPENING = OpenJournal("file:///somewhere", "r", 0, 0)


def info(step: int, size: int) -> EntryInfo:
    return EntryInfo("r", 0, 1, step, step - 1, (Generation("g", 0),), size)


def kept(step: int, data: bytes) -> EntryInfo:
    """As the node describes an entry that it has."""
    return replace(info(step, len(data)), digest=stored_digest(data))


class UnaskedPeers(NodePeers):
    """Nodes that must not be asked."""

    def read(self, node: str, repository: str, key: str, start: int, target: memoryview) -> bool:
        raise AssertionError(f"node {node} is asked")


class Node:
    """A node worker's journal, and training processes that connect to it one after another."""

    def __init__(self) -> None:
        self.journal = NodeJournal("me", BUDGET, UnaskedPeers(), SYSTEM)
        self._listener = Listener(f"raystow-test-{SYSTEM.token()}")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.ring = Ring.create(4 * SLOT, SLOT)
        self.client = self.connect()

    @property
    def address(self) -> str:
        return self._listener.name

    def connect(self) -> JournalClient:
        return JournalClient(self.address, OPENING, self.ring)

    def port(self) -> JournalPort:
        """Connect a process in place of the one before."""
        self.client.close()
        return JournalPort(OPENING, lambda: self._listener.name, settle=no_coordinator, reading=no_coordinator)

    def _run(self) -> None:
        with ThreadPoolExecutor() as pool:
            while (connection := self._listener.accept()) is not None:
                connection.handshake("the process")
                received = connection.receive(OpenJournal)
                assert received is not None
                pool.submit(self._serve, connection, received[0])

    def _serve(self, connection: Connection, opening: OpenJournal) -> None:
        with contextlib.closing(connection), contextlib.suppress(Exception):
            self.journal.serve(connection, opening)

    def record(self, step: int, data: bytes, port: JournalPort | None = None) -> EntryKept:
        """Record an entry; return what has become of it."""
        kept, client = queue.SimpleQueue[EntryKept](), port or self.client
        client.begin(info(step, 0), len(data)).copy(np.frombuffer(data, np.uint8))
        client.keep(info(step, len(data)), kept.put)
        return kept.get(timeout=10)

    def close(self) -> None:
        self.client.close()
        self._listener.close()
        self._thread.join()
        self.journal.close()
        self.ring.close()


def no_coordinator(_: object) -> NoReturn:
    raise AssertionError("the coordinator is asked")


@pytest.fixture
def node() -> Iterator[Node]:
    with contextlib.closing(Node()) as found:
        yield found


def test_entries_larger_than_the_ring_are_kept_and_fetched(node: Node) -> None:
    """Two entries of different sizes, fetched by another process."""
    for step, data in ((1, DATA), (2, DATA[:100])):
        assert node.record(step, data) == EntryKept(step, 0)
        assert node.journal.named("r", info(step, 0).key) == data
    node.client.close()
    node.client = node.connect()
    for number, (step, data) in enumerate(((1, DATA), (2, DATA[:100]))):
        assert node.client.fetch(EntryPlace(kept(step, data), ("me",)), number) == data


def test_memory_of_fetched_entries_is_unmapped_by_the_next_entry(node: Node) -> None:
    place = EntryPlace(kept(1, DATA), ("me",))
    node.record(1, DATA)
    node.client.fetch(place, 0)
    node.record(2, DATA)
    node.client.connection.send(FetchEntry(place, RECORDING + 1))
    answer = node.client._fetched.get(timeout=10)
    assert answer is not None
    assert "is not shared" in answer.problem
    assert node.client.fetch(place, 0) == DATA


def test_an_entry_that_does_not_fit_is_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more of it is copied than fits."""
    copied, copy = list[int](), entry_bytes.copy_all

    def counted(target: Bytes, parts: Sequence[Bytes]) -> None:
        copied.append(target.size)
        copy(target, parts)

    monkeypatch.setattr(entry_bytes, "copy_all", counted)
    assert "is full" in node.record(1, bytes(3 * BUDGET)).problem
    assert 0 < sum(copied) <= BUDGET
    assert node.journal.store.used == 0
    assert node.record(1, DATA) == EntryKept(1, 0)


def test_entries_of_another_training_are_kept(node: Node) -> None:
    """It records on the same node: its entries are dropped for those of others only when it has ended."""
    size, kept = BUDGET // 2, queue.SimpleQueue[EntryKept]()
    mine, ring = replace(info(1, size), repository="other"), Ring.create(4 * SLOT, SLOT)
    with contextlib.closing(JournalClient(node.address, replace(OPENING, repository="other"), ring)) as other:
        other.begin(replace(mine, size=0), size).copy(np.zeros(size, np.uint8))
        other.keep(mine, kept.put)
        assert kept.get(timeout=10) == EntryKept(1, 0)
        assert node.record(1, bytes(size)) == EntryKept(1, 0)
        assert "is full" in node.record(2, DATA).problem
    ring.close()
    wait_until(lambda: node.record(2, DATA) == EntryKept(2, 0), "the other training has ended")
    assert node.journal.named("other", mine.key) is None


def test_an_unfinished_entry_is_dropped(node: Node) -> None:
    """Its process ends."""
    node.client.begin(info(1, 0), len(DATA)).copy(np.frombuffer(DATA, np.uint8))
    node.client.close()
    node.client = node.connect()
    assert node.record(1, b"whole") == EntryKept(1, 0)
    assert node.journal.named("r", info(1, 0).key) == b"whole"


def test_more_bytes_than_announced_close_the_connection(node: Node) -> None:
    with contextlib.suppress(ClusterError):  # the connection may be closed before the second slot is taken
        node.client.begin(info(1, 0), 10).copy(np.frombuffer(DATA[: 2 * SLOT], np.uint8))
    wait_until(lambda: node.client.lost, "the connection is closed")
    with pytest.raises(ClusterError, match="died"):
        node.client.begin(info(1, 0), 10)
    assert node.journal.store.used == 0


def test_entries_without_copies_are_lost_with_their_node(node: Node) -> None:
    """The next entry fails, since it follows them; not if they were saved."""
    with contextlib.closing(node.port()) as port:
        assert node.record(1, DATA, port) == EntryKept(1, 0)
        restart(port)
        with pytest.raises(ClusterError, match="which alone had the entries up to step 1"):
            node.record(2, DATA, port)
        assert node.record(3, DATA, port) == EntryKept(3, 0)
        port.save_begun(3, Generation("g", 0))
        restart(port)
        assert node.record(4, DATA, port) == EntryKept(4, 0)


def test_a_failed_save_replaces_no_entries_of_a_dead_node(node: Node) -> None:
    """The earlier save that the entries follow has not failed."""
    with contextlib.closing(node.port()) as port:
        assert node.record(1, DATA, port) == EntryKept(1, 0)
        port.save_begun(1, Generation("g", 0))
        port.save_begun(2, Generation("g", 0))
        port.save_failed(2)
        restart(port)
        assert node.record(2, DATA, port) == EntryKept(2, 0)
        port.save_begun(2, Generation("g", 0))
        port.save_failed(2)
        restart(port)
        port.save_failed(1)  # does not connect
        with pytest.raises(ClusterError, match="which alone had the entries up to step 2"):
            node.record(3, DATA, port)


def test_a_save_without_an_attempt_is_withdrawn(node: Node) -> None:
    """The node worker opened no attempt for it, and so does not know that it has failed."""
    part = bytes(BUDGET // 3)
    with contextlib.closing(node.port()) as port:
        assert [node.record(step, part, port) for step in (1, 2, 3)] == [EntryKept(step, 0) for step in (1, 2, 3)]
        port.save_begun(3, Generation("g", 0))
        port.save_failed(3)
        assert "is full" in node.record(4, part, port).problem
        assert [held.step for held in node.journal.store.own()] == [1, 2, 3]
        port.save_begun(4, Generation("g", 0))
        port.save_failed(3)  # late
        assert node.record(5, part, port) == EntryKept(5, 0)


def restart(port: JournalPort) -> None:
    """Close the connection, as the end of the node worker does."""
    client = port._client
    assert client is not None
    client.connection.shut()
    wait_until(lambda: client.lost, "the connection is closed")
