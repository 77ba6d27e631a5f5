"""Children of a training process do not keep its connections open."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator

import pytest

from raystow.storage.runtime.clock import SYSTEM
from raystow.workers.protocol.messages import SessionOpened, SlotsFree
from raystow.workers.protocol.unix_channel import Connection, Listener

Ends = tuple[Connection, Connection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Yield the ends of a connection: of the training process, and of the node worker."""
    listener, accepted = Listener(f"raystow-test-{SYSTEM.token()}"), list[Connection]()

    def accept() -> None:
        connection = listener.accept()
        assert connection is not None
        connection.handshake("the training process")
        accepted.append(connection)

    thread = threading.Thread(target=accept)
    thread.start()
    rank = Connection.connect(listener.name)
    thread.join()
    listener.close()
    yield rank, accepted[0]
    for end in (rank, accepted[0]):
        end.close()


def test_a_node_worker_sees_the_end_of_a_rank_despite_its_child(ends: Ends) -> None:
    """The connection goes on while both live. Another thread sends, so the child has its locks as they are."""
    rank, worker = ends
    until, end = os.pipe()
    with rank._sending, rank._starting:
        if not (child := os.fork()):
            os.close(end)
            os.read(until, 1)
            os._exit(0)
    try:
        rank.send(SlotsFree((1,)))
        assert worker.receive(SlotsFree) == (SlotsFree((1,)), None)
        rank._socket.close()  # as the kernel does when the process is killed
        assert select.select([worker], [], [], 10)[0]
        assert worker.receive(SlotsFree) is None
    finally:
        os.close(end)
        os.close(until)
        os.waitpid(child, 0)


def test_received_descriptors_are_closed_in_other_programs(ends: Ends) -> None:
    rank, worker = ends
    descriptor = os.memfd_create("ring")
    worker.send(SessionOpened(1, 4096, 0.0, bytes(32)), fd=descriptor)
    received = rank.receive(SessionOpened)
    assert received is not None
    assert received[1] is not None
    assert not os.get_inheritable(received[1])
    os.close(descriptor)
    os.close(received[1])
