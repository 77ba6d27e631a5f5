"""A training process hands entries over, and waits for its node worker no longer than it must."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from raystow.storage.clock import SYSTEM
from raystow.storage.errors import ClusterError
from raystow.workers.journal import client as journal_client
from raystow.workers.journal.client import JournalClient
from raystow.workers.journal.entry_bytes import SharedMemories
from raystow.workers.protocol.messages import (
    EntryInfo,
    EntryKept,
    EntryPlace,
    EntryTaken,
    FetchedEntry,
    FetchEntry,
    Generation,
    KeepEntry,
    OpenJournal,
    ShareMemory,
)
from raystow.workers.protocol.unix_channel import Connection, Listener

OPENING = OpenJournal("file:///somewhere", "r", 0, 0)


def info(step: int, size: int) -> EntryInfo:
    return EntryInfo("r", 0, 1, step, step - 1, (Generation("g", 0),), size)


class Node:
    """A node worker that answers only when it is told to."""

    def __init__(self) -> None:
        self.shared, self.received = SharedMemories(), queue.SimpleQueue[KeepEntry | FetchEntry]()
        self._listener, opened = Listener(f"raystow-test-{SYSTEM.token()}"), queue.SimpleQueue[Connection]()
        self._thread = threading.Thread(target=self._run, args=(opened,))
        self._thread.start()
        self.client = JournalClient(self._listener.name, OPENING)
        self.connection = opened.get(timeout=10)

    def _run(self, opened: queue.SimpleQueue[Connection]) -> None:
        connection = self._listener.accept()
        assert connection is not None
        connection.handshake("the process")
        connection.receive(OpenJournal)
        opened.put(connection)
        while (received := connection.receive(ShareMemory, KeepEntry, FetchEntry)) is not None:
            message, descriptor = received
            if isinstance(message, ShareMemory):
                assert descriptor is not None
                self.shared.share(message.number, message.size, descriptor)
            else:
                self.received.put(message)
        connection.close()

    def content(self) -> bytes:
        """Return the bytes of the next entry."""
        entry = self.received.get(timeout=10)
        assert isinstance(entry, KeepEntry)
        return self.shared.gathered(entry.memory, entry.spans, entry.info.size).tobytes()

    def close(self) -> None:
        self.client.close()
        self._thread.join()
        self._listener.close()


@pytest.fixture
def node() -> Iterator[Node]:
    with contextlib.closing(Node()) as found:
        yield found


def keep(node: Node, step: int, data: bytes, *parts: bytes) -> queue.SimpleQueue[EntryKept]:
    """Record an entry of which ``data`` is in the shared memory."""
    kept, target = queue.SimpleQueue[EntryKept](), node.client.begin()(len(data))
    target[:] = np.frombuffer(data, np.uint8)
    node.client.keep(info(step, len(data) + sum(map(len, parts))), [*parts, target.data], kept.put)
    return kept


def test_an_entry_is_in_memory_that_the_node_shares(node: Node) -> None:
    kept = keep(node, 1, b"gradients", b"header ")
    assert node.content() == b"header gradients"
    node.connection.send(EntryKept(1, 2))
    assert kept.get(timeout=10) == EntryKept(1, 2)


def test_memory_is_used_again_only_after_the_node_has_copied_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two entries have memory of their own. The third one waits for that of the first."""
    for step in (1, 2):
        keep(node, step, b"%d" % step)
    monkeypatch.setattr(journal_client, "_TAKING", 0.05)
    with pytest.raises(ClusterError, match="has not copied the entry of step 1"):
        node.client.begin()
    assert [node.content(), node.content()] == [b"1", b"2"]
    monkeypatch.setattr(journal_client, "_TAKING", 10.0)
    node.connection.send(EntryTaken(1))
    keep(node, 3, b"3")
    assert node.content() == b"3"


def test_entries_are_lost_with_the_node_worker(node: Node) -> None:
    """Those that wait for an answer, and later ones."""
    kept = keep(node, 1, b"1")
    node.client.begin()
    node.connection.shut()
    assert "died" in kept.get(timeout=10).problem
    with pytest.raises(ClusterError, match="is gone"):
        node.client.keep(info(2, 1), [b"2"], lambda _: None)
    with pytest.raises(ClusterError, match="died"):
        node.client.begin()
    with pytest.raises(ClusterError):
        node.client.fetch(EntryPlace(info(1, 1), ("n",)), 0)


def test_an_entry_begun_with_another_node_worker_is_lost(node: Node) -> None:
    with pytest.raises(ClusterError, match="died"):
        node.client.keep(info(1, 1), [b"1"], lambda _: None)


def test_an_entry_is_fetched_into_shared_memory(node: Node) -> None:
    """Memory that only replays use is gone with the next recorded entry."""
    with answering(node, (b"first", ""), (b"other", "")):
        found = [bytes(node.client.fetch(EntryPlace(info(1, 5), ("n",)), number)) for number in (1, 3)]
    assert found == [b"first", b"other"]
    assert {*node.client._buffers} == {1, 3}
    node.client.begin()
    assert {*node.client._buffers} == {0, 1}


def test_an_entry_that_cannot_be_fetched_raises_cluster_error(node: Node) -> None:
    with answering(node, (b"", "no node has it")), pytest.raises(ClusterError, match="no node has it"):
        node.client.fetch(EntryPlace(info(1, 5), ("n",)), 0)


@contextlib.contextmanager
def answering(node: Node, *answers: tuple[bytes, str]) -> Iterator[None]:
    """Answer fetches, each with an entry and a problem."""

    def run() -> None:
        for data, problem in answers:
            request = node.received.get(timeout=10)
            assert isinstance(request, FetchEntry)
            node.shared.put(request.memory, data)
            node.connection.send(FetchedEntry(problem))

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()
