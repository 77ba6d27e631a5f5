"""States that a process stages in the memory of its node, and that other processes and other nodes read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress

import pytest
from polling import wait_until

from raystow.storage import background
from raystow.storage.clock import SYSTEM
from raystow.storage.coding.kernels import Bytes
from raystow.storage.errors import ClusterError, DeadlineExceeded
from raystow.workers.cache.fetcher import Fetcher
from raystow.workers.cache.tier import MemoryTier
from raystow.workers.journal.node_journal import NodeJournal
from raystow.workers.node.node import NoPeers
from raystow.workers.protocol.messages import OpenStates
from raystow.workers.protocol.tcp_channel import TcpChannel
from raystow.workers.protocol.unix_channel import Listener
from raystow.workers.replication.peer_server import PeerServer
from raystow.workers.replication.replica_store import ReplicaStore
from raystow.workers.states.staged_states import StagedStates
from raystow.workers.states.state_client import StateClient
from raystow.workers.states.state_reader import StateReader
from raystow.workers.usage import Usage

DATA = os.urandom(100_000)
BUDGET = 150_000


class Worker:
    """The part of a node worker that handles states."""

    def __init__(self) -> None:
        self.states = StagedStates(BUDGET)
        tier = MemoryTier(1)
        fetcher, self._journal = Fetcher(tier, NoPeers(), budget=1), NodeJournal("a", 1, NoPeers(), SYSTEM)
        self.server = PeerServer(
            "127.0.0.1", fetcher, ReplicaStore(tier), self._journal, self.states, usage=Usage(SYSTEM), tls=False
        )
        self._listener = Listener(f"raystow-test-{os.getpid()}-{SYSTEM.token()}")
        self.address = self._listener.name
        background.repeat("raystow-accept", self._accept)

    def _accept(self) -> bool:
        if (connection := self._listener.accept()) is None:
            return False
        connection.handshake("a process")
        received = connection.receive(OpenStates)
        assert received is not None
        background.start("raystow-session", self.states.serve, connection, received[0])
        return True

    def close(self) -> None:
        self._listener.close()
        self.server.close()
        self._journal.close()
        self.states.close()

    def read(self, sender: str, step: int, seconds: float = 30.0) -> bytes:
        """Return the bytes that another node reads."""
        with closing(StateReader(self.server.contact, sender, step, seconds)) as reader:
            target = bytearray(len(DATA))
            reader.read(0, memoryview(target))
            return bytes(target)


@pytest.fixture
def worker() -> Iterator[Worker]:
    with closing(Worker()) as worker:
        yield worker


@pytest.fixture
def client(worker: Worker) -> Iterator[Callable[[str], StateClient]]:
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(closing(StateClient(worker.address, name)))


def write(descriptor: int, staged: Callable[[int], None]) -> None:
    assert os.pwrite(descriptor, DATA, 0) == len(DATA)


def whole(receiver: StateClient, sender: str, step: int) -> Bytes:
    """Map a state, and wait until all of it is there."""
    state = receiver.map(sender, step, 30)
    state.wait(len(DATA))
    return state.content


def test_a_state_is_read_by_other_nodes_and_mapped_by_this_one(worker: Worker, client: Callable[[str], StateClient]) -> None:
    sender, receiver = client("sender"), client("receiver")
    sender.stage(3, len(DATA), 30, write)
    assert worker.read("sender", 3) == DATA
    mapped = whole(receiver, "sender", 3)
    assert mapped.tobytes() == DATA
    mapped[0] ^= 1  # the mapping is private
    sender.drop()
    assert mapped[1:].tobytes() == DATA[1:]
    sender.stage(4, len(DATA), 30, write)
    assert worker.read("sender", 4) == DATA


def test_a_state_outlives_its_process_for_some_seconds(worker: Worker, client: Callable[[str], StateClient]) -> None:
    StateClient(worker.address, "sender")._connection.shut()  # before it has staged a state
    with pytest.raises(ClusterError, match="sender of the state: has died"):
        worker.read("sender", 3)
    dying = StateClient(worker.address, "dying")
    dying.stage(3, len(DATA), 1.0, write)
    dying._connection.shut()
    assert worker.read("dying", 3) == DATA
    assert whole(client("receiver"), "dying", 3).tobytes() == DATA
    wait_until(lambda: not worker.states._senders.keys() & {"dying"}, "the state is forgotten")
    with pytest.raises(ClusterError, match="has died, or has no state of step 3 any more"):
        client("other").map("dying", 3, 30)


def test_a_state_that_was_not_staged_whole_is_not_read(worker: Worker) -> None:
    def fail(descriptor: int, staged: Callable[[int], None]) -> None:
        write(descriptor, staged)
        raise RuntimeError("the copy failed")

    sender = StateClient(worker.address, "sender")
    with pytest.raises(RuntimeError, match="the copy failed"):
        sender.stage(3, len(DATA), 30, fail)
    with pytest.raises(DeadlineExceeded, match=r"the state of step 3 did not come within 0\.2 s"):
        worker.read("sender", 3, 0.2)
    sender.close()
    with pytest.raises(ClusterError, match="has died"):
        worker.read("sender", 3)


@pytest.mark.parametrize("end", ["staged", "dropped", "dead"])
def test_first_bytes_are_read_before_the_others_are_staged(
    worker: Worker, client: Callable[[str], StateClient], end: str
) -> None:
    def write_in_parts(descriptor: int, staged: Callable[[int], None]) -> None:
        os.pwrite(descriptor, DATA[:1000], 0)
        staged(1000)
        assert go_on.wait(30)
        if end != "staged":
            raise RuntimeError(end)
        os.pwrite(descriptor, DATA[1000:], 1000)

    def stage() -> None:
        with suppress(RuntimeError):
            sender.stage(3, len(DATA), 30, write_in_parts)
        if end == "dead":
            sender.close()

    sender, go_on = StateClient(worker.address, "sender"), threading.Event()
    wait_until(lambda: "sender" in worker.states._senders, "the sender is known")
    staging = background.start("raystow-staging", stage)
    with closing(sender), closing(StateReader(worker.server.contact, "sender", 3, 30)) as reader:
        first, last = bytearray(1000), bytearray(1000)
        reader.read(0, memoryview(first))
        mapped = client("receiver").map("sender", 3, 30)
        mapped.wait(1000)
        assert first == mapped.content[:1000].tobytes() == DATA[:1000]
        with pytest.raises(DeadlineExceeded), closing(StateReader(worker.server.contact, "sender", 3, 0.2)) as other:
            other.read(1, memoryview(first))
        background.after(0.1, "raystow-go-on", go_on.set)
        if end == "staged":
            reader.read(len(DATA) - 1000, memoryview(last))
            mapped.wait(len(DATA))
            assert last == mapped.content[-1000:].tobytes() == DATA[-1000:]
            with pytest.raises(ClusterError, match="its node does not answer"):
                reader.read(len(DATA) - 999, memoryview(last))
        else:
            with pytest.raises(ClusterError, match="sender of the state: has died, or has no state of step 3 any more"):
                reader.read(len(DATA) - 1000, memoryview(last))
            with pytest.raises(ClusterError, match="sender of the state: has died, or has no state of step 3 any more"):
                mapped.wait(len(DATA))
        staging.join()


def test_a_receiver_waits_for_a_step_and_gets_no_other(worker: Worker, client: Callable[[str], StateClient]) -> None:
    sender, receiver = client("sender"), client("receiver")
    timer = background.after(0.2, "raystow-later", lambda: sender.stage(5, len(DATA), 30, write))
    assert whole(receiver, "sender", 5).tobytes() == DATA
    timer.join()
    for step, error in ((4, ClusterError), (6, DeadlineExceeded)):
        with pytest.raises(error):
            worker.read("sender", step, 0.2)
        with pytest.raises(error):
            client(f"receiver of {step}").map("sender", step, 0.2)


def test_states_of_a_node_share_its_budget(worker: Worker, client: Callable[[str], StateClient]) -> None:
    first, second = client("first"), client("second")
    first.stage(3, len(DATA), 30, write)
    with pytest.raises(
        ClusterError, match="state of step 3: cannot be staged: 100000 bytes do not fit into 150000, of which 100000"
    ):
        second.stage(3, len(DATA), 30, write)
    first.stage(4, len(DATA), 30, write)  # replaces its own state
    first.drop()
    wait_until(lambda: worker.states._senders["first"].memory is None, "the state is dropped")
    second.stage(3, len(DATA), 30, write)
    assert worker.read("second", 3) == DATA


def test_a_state_of_a_sender_that_connects_again_is_dropped(worker: Worker, client: Callable[[str], StateClient]) -> None:
    """The state is not read any more, and its memory is not counted any more."""
    before = StateClient(worker.address, "sender")
    before.stage(3, len(DATA), 30, write)
    assert worker.read("sender", 3) == DATA
    known = worker.states._senders["sender"]
    before._connection.shut()
    client("sender").stage(4, len(DATA), 30, write)
    assert worker.read("sender", 4) == DATA
    assert known.memory is None


def test_connections_in_use_are_closed_by_their_threads(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new connection could get the descriptor, and TLS write into it, while the thread still uses the old one."""
    closed, close = dict[int, str](), TcpChannel.close
    monkeypatch.setattr(
        TcpChannel, "close", lambda self: closed.setdefault(id(self), threading.current_thread().name) and close(self)
    )
    StateClient(worker.address, "sender")
    wait_until(lambda: "sender" in worker.states._senders, "the sender is known")
    reader, errors = StateReader(worker.server.contact, "sender", 3, 30), list[Exception]()

    def read() -> None:
        try:
            reader.read(0, memoryview(bytearray(10)))
        except ClusterError as error:
            errors.append(error)

    thread = threading.Thread(target=read, name="reading")
    thread.start()
    wait_until(lambda: reader._open, "a connection")
    (channel,) = reader._open
    reader.close()
    thread.join(10)
    assert "its node does not answer" in str(errors)
    assert closed[id(channel)] == "reading"


def test_a_client_detects_the_loss_of_its_node_worker(worker: Worker) -> None:
    client = StateClient(worker.address, "sender")
    client._connection.shut()
    wait_until(lambda: client.lost, "the connection is lost")
    with pytest.raises(ClusterError):
        client.stage(1, len(DATA), 30, write)
