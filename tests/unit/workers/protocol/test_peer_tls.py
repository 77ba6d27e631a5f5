"""TLS between node workers: an attacker on the path can neither read nor change data, and callers without a proof have little
effect.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from helpers.fake_clock import FakeClock
from helpers.peer_path import Change, PeerPath
from msgspec.structs import replace

from raystow.storage.errors import ClusterError, StateError
from raystow.workers.cache.fetcher import Fetcher
from raystow.workers.cache.tier import MemoryTier
from raystow.workers.journal.node_journal import NodeJournal
from raystow.workers.node.peer_server import PeerLimits, PeerServer
from raystow.workers.node_peers import NodePeers
from raystow.workers.protocol.messages import AttemptKey, Contact, NodePart, Replica
from raystow.workers.protocol.peer_tls import PEER_TLS, wanted
from raystow.workers.protocol.tcp_channel import TcpChannel
from raystow.workers.replication.peers import Peers
from raystow.workers.replication.replica_store import ReplicaStore
from raystow.workers.usage import Usage

TEXT = b"what nobody else may read. " * 20_000
ATTEMPT = AttemptKey("r", 1, "a" * 16)

LIMITS = PeerLimits()


@contextmanager
def served(*, tls: bool = True, limits: PeerLimits = LIMITS) -> Iterator[PeerServer]:
    tier = MemoryTier(1 << 20)
    tier.put(ATTEMPT, 0, "pack", [TEXT])
    clock = FakeClock()
    peers = Peers(lambda node: server.contact, clock)
    fetcher = Fetcher(tier, peers, budget=1 << 20, node="server")
    journal = NodeJournal("server", 1 << 20, NodePeers(), clock)
    server = PeerServer("127.0.0.1", fetcher, ReplicaStore(tier), journal, usage=Usage(clock), tls=tls, limits=limits)
    try:
        with fetcher.visit():
            yield server
    finally:
        server.close()
        journal.close()


@pytest.fixture
def server() -> Iterator[PeerServer]:
    with served() as made:
        yield made


def read(contact: Contact) -> bytes:
    target = bytearray(len(TEXT))
    peers = Peers(lambda node: contact, FakeClock())
    try:
        assert peers.read("server", "r", "pack", 0, memoryview(target))
    finally:
        peers.close()
    return bytes(target)


@pytest.mark.parametrize("tls", [False, True])
def test_an_eavesdropper_reads_nothing(*, tls: bool) -> None:
    with served(tls=tls) as server:
        path = PeerPath(server.contact)
        assert read(path.contact) == TEXT
        assert (TEXT[:60] in path.seen, b"ReadObject" in path.seen) == (not tls, not tls)
        path.close()


@pytest.mark.parametrize("at", [0, 40, 300, 5000, 200_000])
def test_changed_bytes_end_the_connection(server: PeerServer, at: int) -> None:
    path, count = PeerPath(server.contact), [0]

    def flip(data: bytes) -> bytes:
        start, count[0] = count[0], count[0] + len(data)
        if not start <= at < count[0]:
            return data
        return data[: at - start] + bytes([data[at - start] ^ 1]) + data[at - start + 1 :]

    path.change = flip
    with pytest.raises(ClusterError, match="does not answer"):
        read(path.contact)
    path.close()


@pytest.mark.parametrize("again", [lambda data: data + data, lambda data: data + b"x" * 40, lambda data: data[:-1]])
def test_added_repeated_or_removed_bytes_are_detected(again: Change) -> None:
    with served(limits=PeerLimits(proof=0.5)) as server:
        check_changed(server, again)


def check_changed(server: PeerServer, again: Change) -> None:
    """Read through a path that changes the third part; what is received is right, if anything is."""
    path = PeerPath(server.contact)
    sizes = list[int]()

    def change(data: bytes) -> bytes:
        sizes.append(len(data))
        return again(data) if len(sizes) == 3 else data

    path.change = change
    try:
        assert read(path.contact) == TEXT  # possible if the additional bytes come after the last requested byte
    except ClusterError:
        pass
    path.close()


def test_a_relay_with_its_own_certificate_is_refused(server: PeerServer) -> None:
    """The relay knows the secret, as if it had read the traffic of Ray."""
    with served() as relay:
        relay.contact = replace(relay.contact, secret=server.contact.secret)
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            TcpChannel.connect(replace(relay.contact, certificate=server.contact.certificate))
        TcpChannel.connect(relay.contact).close()


def test_a_caller_without_tls_receives_no_data(server: PeerServer) -> None:
    with pytest.raises(OSError, match=r"."):
        TcpChannel.connect(replace(server.contact, certificate=""))


@pytest.mark.parametrize("tls", [False, True])
def test_idle_callers_do_not_block_other_callers(*, tls: bool) -> None:
    with served(tls=tls, limits=PeerLimits(callers=4, unproven=8)) as server:
        where = server.contact.host, server.contact.port
        idle = [socket.create_connection(where, 30) for _ in range(50)]
        assert read(server.contact) == TEXT
        for one in idle[:40]:
            one.settimeout(30)
            with suppress(ConnectionError):
                while one.recv(4096):
                    pass  # the server closes the connection before the time for a proof ends
        for one in idle:
            one.close()


@pytest.mark.parametrize("tls", [False, True])
def test_a_caller_without_a_timely_proof_is_disconnected(*, tls: bool) -> None:
    with (
        served(tls=tls, limits=PeerLimits(proof=0.2)) as server,
        socket.create_connection((server.contact.host, server.contact.port), 30) as caller,
    ):
        caller.settimeout(30)
        with suppress(ConnectionError):
            while caller.recv(4096):
                pass


def test_a_replica_larger_than_the_memory_is_not_received(server: PeerServer) -> None:
    channel = TcpChannel.connect(server.contact)
    channel.send(Replica(ATTEMPT, 0, "pack", 1 << 29, ("a", "b")))
    with pytest.raises(OSError, match=r"."):
        channel.receive(NodePart)
    channel.close()


_KEY_PAIRS = """
import os
from raystow.workers.protocol.peer_tls import server_context
server_context()  # imports, and opens what stays open
before = sorted(os.listdir("/proc/self/fd"))
certificates = {server_context()[1] for _ in range(3)}
assert len(certificates) == 3
assert "PRIVATE" not in "".join(certificates)
assert sorted(os.listdir("/proc/self/fd")) == before
"""


def test_each_worker_has_its_own_key_pair_and_leaves_no_file() -> None:
    """In a process of its own, where no other thread opens or closes files."""
    subprocess.run([sys.executable, "-c", _KEY_PAIRS], check=True, timeout=60)


@pytest.mark.parametrize(
    ("ray", "own", "expected"),
    [(None, None, False), ("0", None, False), ("1", None, True), ("true", None, True), ("1", "0", False), (None, "1", True)],
)
def test_tls_is_used_if_ray_uses_tls(
    monkeypatch: pytest.MonkeyPatch, ray: str | None, own: str | None, *, expected: bool
) -> None:
    for name, value in (("RAY_USE_TLS", ray), (PEER_TLS, own)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert wanted() is expected
    monkeypatch.setenv(PEER_TLS, "yes")
    with pytest.raises(StateError, match="'yes'"):
        wanted()
