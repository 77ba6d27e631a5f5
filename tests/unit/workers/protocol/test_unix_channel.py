"""Connections within a node do not outlive an error."""

from __future__ import annotations

import array
import os
import socket
import struct
import threading
from contextlib import closing

import pytest

from raystow.storage.errors import ClusterError, ProtocolError
from raystow.storage.runtime.clock import SYSTEM
from raystow.workers.protocol.messages import ShareMemory
from raystow.workers.protocol.unix_channel import Connection, Listener


@pytest.mark.parametrize("body", [b"killed before the end", b"no message" * 10])
def test_the_descriptor_of_a_broken_message_is_closed(body: bytes) -> None:
    """It may be that of a ring of a GB. The other process was killed while it sent, or does not follow the protocol."""
    mine, theirs = socket.socketpair()
    descriptor = os.memfd_create("ring")
    with theirs, closing(Connection(mine)) as connection:
        theirs.sendmsg([struct.pack("<I", 100)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])
        theirs.sendall(body)
        theirs.shutdown(socket.SHUT_WR)
        open_before = len(os.listdir("/proc/self/fd"))
        try:
            assert connection.receive(ShareMemory) is None
        except ProtocolError:
            assert len(body) == 100
        assert len(os.listdir("/proc/self/fd")) == open_before
    os.close(descriptor)


def test_a_frozen_node_worker_ends_a_connect() -> None:
    """It accepts nothing, and has as many callers as can wait."""
    listener, waiting, errors = Listener(f"raystow-test-{SYSTEM.token()}"), list[socket.socket](), list[ClusterError]()

    def connect() -> None:
        try:
            Connection.connect(listener.name, patience=0.2)
        except ClusterError as error:
            errors.append(error)

    while not waiting or not waiting[-1].connect_ex(f"\0{listener.name}"):
        waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        waiting[-1].setblocking(False)
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(10)
    listener.close()
    for caller in waiting:
        caller.close()
    assert "does not answer" in str(errors)
