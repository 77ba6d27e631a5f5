"""A training process hands entries over, and waits for its node worker no longer than it must."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from raystow.storage.errors import ClusterError
from raystow.storage.runtime.clock import SYSTEM
from raystow.workers.journal.client import JournalClient
from raystow.workers.journal.entry_bytes import ArrivingEntry, SharedMemories
from raystow.workers.journal.entry_writer import EntryWriter
from raystow.workers.protocol.messages import (
    RECORDING,
    AppendEntry,
    BeginEntry,
    EntryInfo,
    EntryKept,
    EntryPlace,
    FetchedEntry,
    FetchEntry,
    Generation,
    KeepEntry,
    Message,
    OpenJournal,
    ShareMemory,
    SlotsFilled,
    SlotsFree,
)
from raystow.workers.protocol.unix_channel import Connection, Listener
from raystow.workers.shm.ring import Ring

OPENING = OpenJournal("file:///somewhere", "r", 0, 0)
SLOTS, SLOT = 3, 4096
DATA = os.urandom(SLOTS * SLOT)


def info(step: int, size: int) -> EntryInfo:
    return EntryInfo("r", 0, 1, step, step - 1, (Generation("g", 0),), size)


class Node:
    """A node worker that handles messages only on request. ``limits``: of the client."""

    def __init__(self, **limits: float) -> None:
        self.shared, self.received = SharedMemories(), queue.SimpleQueue[Message]()
        self.arriving = ArrivingEntry(0)
        self._listener, opened = Listener(f"raystow-test-{SYSTEM.token()}"), queue.SimpleQueue[Connection]()
        self._thread = threading.Thread(target=self._run, args=(opened,))
        self._thread.start()
        self.ring = Ring.create(SLOTS * SLOT, SLOT)
        self.client = JournalClient(self._listener.name, OPENING, self.ring, **limits)
        self.connection = opened.get(timeout=10)

    def _run(self, opened: queue.SimpleQueue[Connection]) -> None:
        connection = self._listener.accept()
        assert connection is not None
        connection.handshake("the process")
        connection.receive(OpenJournal)
        opened.put(connection)
        kinds = ShareMemory, BeginEntry, AppendEntry, SlotsFilled, KeepEntry, FetchEntry
        while (received := connection.receive(*kinds)) is not None:
            message, descriptor = received
            if isinstance(message, ShareMemory):
                assert descriptor is not None
                self.shared.share(message.number, message.size, descriptor)
            else:
                self.received.put(message)
        connection.close()

    def content(self) -> bytes:
        """Handle the messages up to the end of an entry; return its bytes."""
        while not isinstance(message := self.received.get(timeout=10), KeepEntry):
            self.handle(message)
        assert self.arriving.size == message.info.size
        return bytes(self.arriving.content())

    def handle(self, message: Message) -> None:
        match message:
            case BeginEntry(_, most):
                self.arriving = ArrivingEntry(most)
            case AppendEntry(spans):
                self.arriving.append(self.shared.parts(RECORDING, spans))
            case SlotsFilled(slots):
                self.connection.send(SlotsFree(slots))

    def handle_soon(self) -> threading.Timer:
        """Handle all messages of an entry in another thread, after a while."""
        timer = threading.Timer(0.1, self.content)
        timer.start()
        return timer

    def close(self) -> None:
        self.client.close()
        self._thread.join()
        self._listener.close()
        self.ring.close()


@pytest.fixture
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    with contextlib.closing(Node(**getattr(request, "param", {}))) as found:
        yield found


def keep(node: Node, step: int, *parts: bytes) -> queue.SimpleQueue[EntryKept]:
    """Record an entry."""
    kept, writer, at = queue.SimpleQueue[EntryKept](), node.client.begin(info(step, 0), 1 << 20), 0
    for part in parts:
        assert writer.copy(np.frombuffer(part, np.uint8)) == at
        at += len(part)
    node.client.keep(info(step, at), kept.put)
    return kept


def take_all(writer: EntryWriter) -> None:
    """Take slots until an error is raised."""
    while True:
        writer.take()


def test_an_entry_passes_through_the_ring(node: Node) -> None:
    kept = keep(node, 1, b"gradients", b" header")
    assert node.content() == b"gradients header"
    node.connection.send(EntryKept(1, 2))
    assert kept.get(timeout=10) == EntryKept(1, 2)


def test_bytes_in_the_ring_are_added_between_copied_ones(node: Node) -> None:
    """Spans that follow each other are one."""
    writer = node.client.begin(info(1, 0), 1 << 20)
    assert writer.copy(np.frombuffer(b"first", np.uint8)) == 0
    slot = writer.take()
    assert slot is not None
    node.ring.slot(slot)[:6] = np.frombuffer(b"middle", np.uint8)
    assert writer.add([(slot, 3, 3), (slot, 0, 3), (slot, 3, 3)]) == 5
    writer.release([slot])
    assert writer.copy(np.frombuffer(b"last", np.uint8)) == 14
    node.client.keep(info(1, 18), lambda _: None)
    assert node.content() == b"firstdlemiddlelast"


def test_an_entry_may_be_larger_than_the_ring(node: Node) -> None:
    """Slots are used again once the node worker has emptied them."""
    timer = node.handle_soon()
    keep(node, 1, DATA[:100], DATA, DATA)
    timer.join()
    assert node.arriving.content() == DATA[:100] + DATA + DATA


@pytest.mark.parametrize("node", [{"slot_patience": 0.05}], indirect=True)
def test_a_slot_is_filled_again_only_when_the_node_has_copied_it(node: Node) -> None:
    for step in range(SLOTS):
        keep(node, step, b"%d" % step)
    with pytest.raises(ClusterError, match="has not copied parts of an entry"):
        keep(node, SLOTS, b"more")
    assert [node.content() for _ in range(SLOTS)] == [b"0", b"1", b"2"]
    keep(node, 4, b"4")
    assert node.content() == b"4"


def test_an_entry_that_was_not_kept_is_dropped(node: Node) -> None:
    node.client.begin(info(2, 0), 10).copy(np.frombuffer(b"failed", np.uint8))
    keep(node, 2, b"2")
    assert node.content() == b"2"


def test_entries_are_lost_with_the_node_worker(node: Node) -> None:
    """Those that wait for an answer, and later ones."""
    kept, writer = keep(node, 1, b"1"), node.client.begin(info(2, 0), 10)
    node.connection.shut()
    assert "died" in kept.get(timeout=10).problem
    with pytest.raises(ClusterError, match="died"):
        take_all(writer)
    with pytest.raises(ClusterError, match="died"):
        node.client.keep(info(2, 0), lambda _: None)
    with pytest.raises(ClusterError, match="died"):
        node.client.begin(info(2, 0), 10)
    with pytest.raises(ClusterError):
        node.client.fetch(EntryPlace(info(1, 1), ("n",)), 0)


def test_an_entry_begun_with_another_node_worker_is_lost(node: Node) -> None:
    with pytest.raises(ClusterError, match="died"):
        node.client.keep(info(1, 1), lambda _: None)


def test_an_entry_is_fetched_into_shared_memory(node: Node) -> None:
    """The memory is gone with the next recorded entry."""
    with answering(node, (b"first", ""), (b"other", "")):
        found = [bytes(node.client.fetch(EntryPlace(info(1, 5), ("n",)), number)) for number in (1, 3)]
    assert found == [b"first", b"other"]
    assert len(node.client._memories) == 2
    node.client.begin(info(2, 0), 10)
    assert not node.client._memories


def test_an_entry_that_cannot_be_fetched_raises_cluster_error(node: Node) -> None:
    with answering(node, (b"", "no node has it")), pytest.raises(ClusterError, match="no node has it"):
        node.client.fetch(EntryPlace(info(1, 5), ("n",)), 0)


@pytest.mark.parametrize("node", [{"patience": 0.05}], indirect=True)
def test_a_late_answer_is_to_no_other_fetch(node: Node) -> None:
    with pytest.raises(ClusterError, match="no entry after"):
        node.client.fetch(EntryPlace(info(1, 5), ("n",)), 0)
    assert isinstance(node.received.get(timeout=10), FetchEntry)
    with contextlib.suppress(ClusterError):
        node.connection.send(FetchedEntry())
    with pytest.raises(ClusterError):
        node.client.fetch(EntryPlace(info(2, 5), ("n",)), 1)


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
