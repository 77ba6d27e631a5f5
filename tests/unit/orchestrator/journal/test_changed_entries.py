"""An attacker on the line between two nodes, without TLS, changes entries of recorded steps without changing their length."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import pytest
from helpers.peer_path import PeerPath
from helpers.peer_workers import Cluster, Worker
from helpers.polling import wait_until
from helpers.segment_run import Training

from raystow.orchestrator.journal.cluster_port import ClusterPort
from raystow.orchestrator.journal.journal import Journal, JournalIdentity
from raystow.orchestrator.journal.rounds import JournalRounds
from raystow.orchestrator.journal.tracked_state import TrackedState
from raystow.storage.coding.digest import stored_digest
from raystow.storage.runtime import background
from raystow.storage.runtime.clock import SYSTEM
from raystow.workers.protocol.coordinator_client import CoordinatorClient
from raystow.workers.protocol.messages import EntryInfo, JournalVote, Message, OpenJournal, Request
from raystow.workers.protocol.unix_channel import Listener

STEPS = 3
_TAIL = struct.Struct("<Q32s")


def forged(content: bytes) -> bytes:
    """What ends with an entry, with other values, and a header that has its digest."""
    length, _ = _TAIL.unpack(content[-_TAIL.size :])
    start = len(content) - _TAIL.size - length
    body = content[start : start + length].replace(b"at 1000", b"at 9999")
    return content[:start] + body + _TAIL.pack(length, stored_digest(body))


class Line:
    """The line to a node. ``known``: returns the entries that the attacker replaces."""

    def __init__(self, cluster: Cluster, node: str, known: Callable[[], Sequence[bytes]], *, digests: bool = False) -> None:
        self.path, self.known, self._digests = PeerPath(cluster[node].peer_server.contact), known, digests
        self.path.change = self.path.change_call = self._change
        self.attacks = 0
        cluster.lines[node] = self.path.contact

    def _change(self, data: bytes) -> bytes:
        found = data
        for content in self.known():
            found = found.replace(content, forged(content))
            if self._digests:
                found = found.replace(stored_digest(content), stored_digest(forged(content)))
        self.attacks += found != data
        return found


class Run(JournalRounds, CoordinatorClient):
    """One rank that records steps on a node, which is restarted, and the agreement of the coordinator."""

    def __init__(self, cluster: Cluster, replicas: int) -> None:
        super().__init__(SYSTEM)
        self._cluster, self._replicas = cluster, replicas

    def call(self, request: Request[Any], timeout: float) -> Message:
        assert isinstance(request, JournalVote)
        return self.vote(request, self.survey).answer(request)

    def send(self, request: Request[Any]) -> None: ...

    def survey(self) -> Mapping[str, Sequence[EntryInfo]]:
        return {name: worker.journal.store.holdings("r") for name, worker in self._cluster.workers.items()}

    def serve(self, worker: Worker, stack: ExitStack) -> str:
        """Let processes connect to the journal of a node; return its address."""
        listener = stack.enter_context(closing(Listener(f"raystow-test-{SYSTEM.token()}")))

        def accept() -> bool:
            if (connection := listener.accept()) is None:
                return False
            connection.handshake("the process")
            received = connection.receive(OpenJournal)
            assert received is not None
            background.start("raystow-session", worker.journal.serve, connection, received[0])
            return True

        background.repeat("raystow-accept", accept)
        return listener.name

    def journal(self, training: Training, stack: ExitStack) -> Journal:
        """The journal of a new process on node a."""
        address = self.serve(self._cluster["a"], stack)
        opening = OpenJournal("memory://r", "r", 0, self._replicas)
        identity = JournalIdentity("memory://r", "r", 0, 1, SYSTEM.token(), 30.0)
        port = ClusterPort(opening, lambda: address, self)
        return stack.enter_context(closing(Journal(TrackedState(training.model, [training.optimizer]), port, identity)))

    def record(self) -> list[bytes]:
        """Record some steps; return the state after the last one."""
        with ExitStack() as stack:
            training = Training()
            journal = self.journal(training, stack)
            journal.replay()
            for number in range(1, STEPS + 1):
                training.step(number)
                journal.record(number, {"data": "at 1000"})
            assert journal.flush()
            return training.bits()

    def replay(self) -> tuple[object, list[bytes]]:
        """Replay in a new process, on a new worker of node a; return the values, and the state."""
        self._cluster.lines.pop("a", None)
        self._cluster.start("a")
        with ExitStack() as stack:
            training = Training()
            return self.journal(training, stack).replay(), training.bits()

    def contents(self, node: str) -> list[bytes]:
        """The entries that a node has, by their steps."""
        store = self._cluster[node].journal.store
        found = sorted(store.holdings("r"), key=lambda info: info.step)
        return [bytes(view) for info in found if (view := store.view(info)) is not None]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    found = Cluster()
    found.start("a", "b", "c")
    found.zones |= {"a": "a", "b": "b"}
    yield found
    for name in list(found.workers):
        found.kill(name)


def test_an_entry_that_a_line_has_changed_is_not_replayed(cluster: Cluster) -> None:
    """On its way from a partner. The node keeps nothing of it."""
    run = Run(cluster, 1)
    run.record()
    contents = run.contents("b")
    assert len(contents) == STEPS
    line = Line(cluster, "b", lambda: contents)
    values, state = run.replay()
    line.path.close()
    assert line.attacks
    assert (values, state) == (None, Training().bits())
    assert run.contents("a") == []


def test_an_entry_is_read_from_another_partner(cluster: Cluster) -> None:
    """One that sends it unchanged."""
    cluster.zones["c"] = "c"
    run = Run(cluster, 2)
    trained, contents = run.record(), run.contents("b")
    line = Line(cluster, "b", lambda: contents)
    assert run.replay() == ({"data": "at 1000"}, trained)
    line.path.close()
    assert line.attacks


@pytest.mark.parametrize("digests", [False, True], ids=["bytes", "bytes and digests"])
def test_a_partner_keeps_no_changed_entry(cluster: Cluster, *, digests: bool) -> None:
    """Also if the attacker changes what announces it."""
    run = Run(cluster, 1)
    lines = [Line(cluster, node, lambda: run.contents("a"), digests=digests) for node in ("a", "b")]
    run.record()
    assert any(line.attacks for line in lines)
    assert run.contents("b") == []
    for line in lines:
        line.path.change = line.path.change_call = bytes
    cluster.clock.sleep(60)  # longer than another node is not asked after an error
    cluster["a"].journal.committed("another", 0)  # wakes what sends copies
    wait_until(lambda: run.contents("b") == run.contents("a"), "the partner has the entries")
    for line in lines:
        line.path.close()
