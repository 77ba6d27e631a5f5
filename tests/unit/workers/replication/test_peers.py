"""Node workers that communicate over real sockets on this machine."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FuturesTimeout
from typing import Any

import pytest
from helpers.fake_clock import FakeClock
from helpers.peer_path import PeerPath
from helpers.peer_workers import Cluster
from msgspec.structs import replace

from raystow.storage.coding.digest import stored_digest
from raystow.storage.errors import ClusterError, StoreUnavailable
from raystow.storage.stores.memory import MemoryStore
from raystow.workers.journal import node_journal
from raystow.workers.node.peer_server import PeerLimits
from raystow.workers.protocol import tcp_channel
from raystow.workers.protocol.messages import (
    GREETING,
    AttemptKey,
    ClaimSpan,
    Contact,
    EntryInfo,
    Generation,
    PutEntry,
    ReadCached,
    Replica,
    RestoreGroup,
)
from raystow.workers.protocol.tcp_channel import TcpChannel
from raystow.workers.replication.peers import Peers

DATA = os.urandom(3_000_000)
ATTEMPT = AttemptKey("r", 1, "a" * 16)


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = Cluster(tls=request.param)
    cluster.start("a", "b", "c")
    yield cluster
    for name in list(cluster.workers):
        cluster.kill(name)


def read(cluster: Cluster, by: str, node: str, key: str, start: int, length: int) -> bytes | None:
    target = bytearray(length)
    return bytes(target) if cluster[by].peers.read(node, "r", key, start, memoryview(target)) else None


def test_a_range_is_read_from_the_memory_of_another_node(cluster):
    cluster["a"].tier.put(ATTEMPT, 0, "pack", [DATA])
    assert read(cluster, "b", "a", "pack", 7, 2_000_000) == DATA[7:2_000_007]
    assert read(cluster, "b", "a", "pack", 0, len(DATA)) == DATA
    assert read(cluster, "b", "a", "another", 0, 10) is None
    assert cluster.asked == {"a": 1}


def test_many_threads_read_from_one_node_at_a_time(cluster):
    cluster["a"].tier.put(ATTEMPT, 0, "pack", [DATA])
    with ThreadPoolExecutor(8) as threads:
        got = list(threads.map(lambda i: read(cluster, "b", "a", "pack", i, 100_000), range(0, 2_000_000, 20_000)))
    assert got == [DATA[i : i + 100_000] for i in range(0, 2_000_000, 20_000)]


def test_a_replica_keeps_its_bytes_and_base(cluster):
    base = AttemptKey("r", 0, "ff" * 8)
    copy = Replica(ATTEMPT, 3, "pack", len(DATA), ("b", "a"), base=base)
    part = cluster["b"].peers.accept("a", copy, memoryview(DATA))
    assert (part.objects, part.replica_order, part.incomplete) == ({"pack": len(DATA)}, ("b", "a"), False)
    assert cluster["a"].tier.view("r", "pack") == DATA
    too_early = replace(copy, key="fragment", size=1, after=("pack", "another pack"))
    assert cluster["b"].peers.accept("a", too_early, b"x").objects.keys() == {"pack"}
    assert [held.base for held in cluster["a"].tier.holdings("r")] == [base]


@pytest.mark.parametrize("side", ["change", "change_call"])
def test_a_message_changed_on_its_way_is_refused(side: str) -> None:
    """Without TLS: a request, which would name another store, and an answer, which would name another object."""
    cluster = Cluster()
    cluster.start("a", "b")
    path = PeerPath(cluster["b"].peer_server.contact)
    cluster.lines["b"] = path.contact
    setattr(path, side, lambda data: data.replace(b"memory://mine", b"memory://evil").replace(b"packed", b"evaded"))
    copy = Replica(ATTEMPT, 3, "packed", len(DATA), ("a", "b"), uri="memory://mine")
    with pytest.raises(ClusterError, match="does not answer"):
        cluster["a"].peers.accept("b", copy, memoryview(DATA))
    assert "memory://evil" not in str(cluster["b"].peer_server._replicas.stores)
    path.close()
    for name in "ab":
        cluster.kill(name)


def test_a_message_that_is_repeated_on_its_way_is_refused() -> None:
    secret, received = "00" * 32, list[str]()

    def serve(server: socket.socket) -> None:
        channel = TcpChannel(server.accept()[0])
        channel.accept(secret, None)
        try:
            while True:
                received.append(channel.receive(ClaimSpan).key)
        except OSError as error:
            received.append(str(error))
        channel.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        path = PeerPath(Contact("127.0.0.1", server.getsockname()[1], secret))
        head = 6  # bytes of the message before the name of its class
        path.change_call = lambda data: data + data[data.index(b"ClaimSpan") - head :] if b"ClaimSpan" in data else data
        channel = TcpChannel.connect(path.contact)
        channel.send(ClaimSpan("round", "pack", (0, 1), "a"))
        thread.join(30)
        channel.close()
        path.close()
    assert received == ["pack", "a message was changed on its way"]


def test_a_peer_without_the_secret_receives_no_data(cluster):
    cluster["a"].tier.put(ATTEMPT, 0, "pack", [DATA])
    wrong = replace(cluster["a"].peer_server.contact, secret="00" * 32)
    with pytest.raises(OSError, match="does not know the secret"):
        TcpChannel.connect(wrong)
    if cluster.tls:
        return
    with socket.create_connection((wrong.host, wrong.port), 10) as caller:
        caller.settimeout(10)
        caller.sendall(GREETING + bytes(16))
        assert caller.recv(32, socket.MSG_WAITALL) == GREETING
        assert len(caller.recv(48, socket.MSG_WAITALL)) == 48
        caller.sendall(bytes(32))
        assert caller.recv(1) == b""  # the server has closed the connection


def test_a_dead_node_is_not_contacted_again_for_some_time(cluster):
    cluster.kill("a")
    for _ in range(3):
        with pytest.raises(ClusterError, match="node a"):
            read(cluster, "b", "a", "pack", 0, 10)
    assert cluster.asked == {"a": 1}
    cluster.start("a")
    cluster.clock.time += 31
    assert read(cluster, "b", "a", "pack", 0, 10) is None


def test_a_restarted_worker_is_found_immediately(cluster):
    cluster["a"].tier.put(ATTEMPT, 0, "pack", [DATA])
    assert read(cluster, "b", "a", "pack", 0, 10) == DATA[:10]
    cluster.kill("a")
    cluster.start("a")
    assert read(cluster, "b", "a", "pack", 0, 10) is None
    assert cluster.asked == {"a": 2}


def test_a_read_from_a_frozen_node_times_out(cluster):
    cluster["b"].peers.stall = 0.2
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # the kernel accepts the connection, no process answers
        cluster.workers["a"].peer_server.contact = Contact("127.0.0.1", frozen.getsockname()[1], "00" * 32)
        with pytest.raises(ClusterError, match="timed out"):
            read(cluster, "b", "a", "pack", 0, 10)


class Counting(MemoryStore):
    """Counts the bytes that are read. A read waits until ``open`` is set."""

    def __init__(self, *objects: str) -> None:
        super().__init__("peers")
        self.read, self.begun, self.open = Counter[str](), threading.Event(), threading.Event()
        self.open.set()
        for key in objects:
            self.put(key, [DATA])

    def get_range_into(self, key: str, start: int, target: memoryview) -> None:
        self.begun.set()
        assert self.open.wait(60)
        self.read[key] += target.nbytes
        super().get_range_into(key, start, target)


def get(cluster: Cluster, by: str, store: Any, key: str, *span: int, group: RestoreGroup | None = None) -> bytes:
    group = group or RestoreGroup("restore", tuple(sorted(cluster.workers)))
    wanted = ReadCached("r", key, len(DATA), ((span[0], span[1]),), round=group.round, owner=group.owner(key))
    cluster[by].reads.append(read := Counter[str]())
    with open(cluster[by].fetcher.get(wanted, store, read)[0].descriptor, "rb") as file:
        return os.pread(file.fileno(), span[1] - span[0], span[0])


def test_objects_that_all_nodes_read_leave_the_store_once(cluster):
    objects = [f"pack{i}" for i in range(6)]
    store = Counting(*objects)
    with ThreadPoolExecutor(18) as threads:
        wanted = [(node, key) for i, node in enumerate("abc") for key in (*objects[2 * i :], *objects[: 2 * i])]
        got = list(threads.map(lambda one: get(cluster, one[0], store, one[1], 0, len(DATA)), wanted))
    assert all(data == DATA for data in got)
    assert store.read == dict.fromkeys(objects, len(DATA))
    told = [cluster[node].read for node in "abc"]
    assert sum(read["store"] for read in told) == 6 * len(DATA)
    assert sum(read["peer"] for read in told) == 12 * len(DATA)
    assert sum(read["instead"] for read in told) == 0


def test_overlapping_ranges_are_read_from_the_store_once(cluster):
    store = Counting("pack")
    wanted = ("a", 0, 1_000_000), ("b", 900_000, 2_000_000), ("c", 1_900_000, 3_000_000), ("a", 500, 2_999_000)
    for node, start, end in wanted:
        assert get(cluster, node, store, "pack", start, end) == DATA[start:end]
    assert store.read == {"pack": len(DATA)}


def test_a_node_waits_for_bytes_that_another_node_reads(cluster):
    cluster.limits = PeerLimits(wait=0.05)
    cluster.start("a", "b", "c")
    store = Counting("pack")
    store.open.clear()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(get, cluster, "a", store, "pack", 0, len(DATA))
        assert store.begun.wait(60)
        second = threads.submit(get, cluster, "b", store, "pack", 0, len(DATA))
        with pytest.raises(FuturesTimeout):
            second.result(0.3)  # longer than the wait of one request
        store.open.set()
        assert first.result(60) == second.result(60) == DATA
    assert store.read == {"pack": len(DATA)}


def test_a_node_stops_waiting_for_a_slow_reader(cluster, caplog):
    cluster.limits = PeerLimits(wait=0.01)
    cluster.start("a", "b", "c")
    cluster["b"].peers.patience = -1.0
    slow, quick = Counting("pack"), Counting("pack")
    slow.open.clear()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(get, cluster, "a", slow, "pack", 0, 1000)
        assert slow.begun.wait(60)
        assert get(cluster, "b", quick, "pack", 0, 1000) == DATA[:1000]
        slow.open.set()
        first.result(60)
    assert cluster["b"].read["instead"] == 1000
    assert "since node a did not send them" in caplog.text
    assert get(cluster, "c", quick, "pack", 0, 1000) == DATA[:1000]  # from node b, which read the bytes instead of node a
    assert cluster["c"].read["peer"] == 1000


@pytest.mark.parametrize("dead", ["a", "b", "c"])
def test_other_nodes_take_over_the_reads_of_a_dead_node(cluster, dead):
    """The dead node is the owner of the claims, the reader, or a third node."""
    store, group = Counting("pack"), RestoreGroup("restore", ("a", "b", "c"))
    reader = "a" if dead != "b" else "b"
    assert get(cluster, reader, store, "pack", 0, 1000, group=group) == DATA[:1000]
    cluster.kill(dead)
    for node in cluster.workers:
        assert get(cluster, node, store, "pack", 0, 2000, group=group) == DATA[:2000]
    assert 2000 <= store.read["pack"] <= 5000


def test_another_node_retries_a_failed_store_read(cluster):
    class Down(Counting):
        def get_range_into(self, key: str, start: int, target: memoryview) -> None:
            raise StoreUnavailable("503", subject=key)

    with pytest.raises(StoreUnavailable):
        get(cluster, "a", Down("pack"), "pack", 0, 1000)
    assert get(cluster, "b", Counting("pack"), "pack", 0, 1000) == DATA[:1000]


def test_bytes_claimed_for_other_nodes_are_evicted_last():
    cluster, store = Cluster(), Counting("pack1", "pack2", "pack3")
    cluster.start("a", "b", budget=2 * len(DATA))
    get(cluster, "a", store, "pack1", 0, len(DATA))
    get(cluster, "b", store, "pack2", 0, len(DATA))
    get(cluster, "b", store, "pack3", 0, len(DATA))
    for key in ("pack2", "pack3", "pack1"):
        get(cluster, "a", store, key, 0, len(DATA))
    get(cluster, "b", store, "pack1", 0, len(DATA))
    assert sum(store.read.values()) == 3 * len(DATA)
    for name in list(cluster.workers):
        cluster.kill(name)


def test_another_protocol_version_raises_cluster_error(cluster, monkeypatch):
    monkeypatch.setattr(tcp_channel, "GREETING", b"1.0123456789abcdef".ljust(32, b"\0"))
    with pytest.raises(ClusterError, match="speaks protocol"):
        read(cluster, "b", "a", "pack", 0, 10)


def test_a_journal_entry_is_copied_to_a_peer_and_read_back(cluster: Cluster) -> None:
    """An entry that does not fit is refused before its bytes are read. A dropped entry cannot be copied."""
    cluster.start("a", "b")
    data = DATA[:100_000]
    info = EntryInfo("r", 0, 1, 4, 3, (Generation("g", 0),), len(data), stored_digest(data))
    assert "has dropped it" in cluster["a"].peers.put_entry("b", PutEntry(info, 4, "a")).problem
    cluster["a"].journal.store.add(info, data, own=True)
    kept = cluster["a"].peers.put_entry("b", PutEntry(info, 4, "a"))
    assert (kept.problem, kept.copies) == ("", 1)
    target = bytearray(info.size)
    assert cluster["a"].peers.read("b", "r", info.key, 0, memoryview(target))
    assert target == data
    large = replace(info, step=5, previous=4, size=2 << 20)
    assert "is full" in cluster["a"].peers.put_entry("b", PutEntry(large, 4, "a")).problem
    with pytest.raises(ClusterError, match="does not answer"):  # the source node does not exist, so there is no copy
        cluster["a"].peers.put_entry("c", PutEntry(info, 4, "gone"))
    assert cluster["b"].journal.store.holdings("r") == (info,)
    cluster["b"].journal.store.add(info, data, own=True)
    assert cluster["b"].journal.store.own() == [info]


def test_a_large_entry_is_read_over_several_connections(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_journal, "LEAST_SHARE", 100_000)
    channel, all_of_them = cluster["b"].peers.channel, threading.Barrier(8)

    def together(node: str) -> TcpChannel:
        """Return a channel once all eight threads have one, so that no thread can reuse the channel of another."""
        found = channel(node)
        all_of_them.wait(10)
        return found

    monkeypatch.setattr(cluster["b"].peers, "channel", together)
    info = EntryInfo("r", 0, 1, 4, 3, (Generation("g", 0),), 700_001, stored_digest(DATA[:700_001]))
    cluster["a"].journal.store.add(info, DATA[: info.size], own=True)
    assert cluster["a"].peers.put_entry("b", PutEntry(info, 4, "a")).copies == 1
    assert cluster["b"].journal.store.view(info) == DATA[: info.size]
    assert len(cluster["a"].peer_server._channels) == 8


@pytest.mark.parametrize(("took", "pause"), [(0.0, 1.0), (2.0, 6.0), (20.0, 30.0)])
def test_the_pause_after_a_failure_depends_on_its_duration(took: float, pause: float) -> None:
    """A replaced worker is found soon, and a worker that hangs costs a small part of the time."""
    clock, asked = FakeClock(), list[str]()

    def find(node: str) -> Contact:
        asked.append(node)
        clock.sleep(took)
        raise ClusterError("there is no worker", subject=node)

    peers = Peers(find, clock)

    def ask() -> int:
        with pytest.raises(ClusterError):
            peers.read("a", "r", "key", 0, memoryview(bytearray(1)))
        return len(asked)

    assert ask() == 1
    clock.sleep(pause - 0.01)
    assert ask() == 1
    clock.sleep(0.02)
    assert ask() == 2
