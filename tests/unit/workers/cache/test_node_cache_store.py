"""Reads of a rank through its node worker, and the cases in which the rank reads from the store itself."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.pack_memory import opened
from helpers.polling import wait_until
from helpers.scripted_store import ScriptedStore, script

from raystow.storage.errors import RaystowError, StoreError, StoreUnavailable
from raystow.storage.format import keys
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores.memory import MemoryStore
from raystow.workers.cache import cache_server
from raystow.workers.cache.cache_server import serve_reads
from raystow.workers.cache.fetcher import Fetcher
from raystow.workers.cache.lent_memory import LentMemory
from raystow.workers.cache.node_cache_store import HELD, NodeCacheStore, ObjectLocation
from raystow.workers.cache.tier import MemoryTier
from raystow.workers.node_peers import NodePeers
from raystow.workers.protocol.messages import Acknowledged, AttemptKey, ReadCached
from raystow.workers.protocol.unix_channel import Connection, Listener
from raystow.workers.shm.ring import Ring
from raystow.workers.shm.slots import Slots


class Failing(ScriptedStore):
    """The store of the node worker, which fails with ``error``."""

    error: RaystowError | None = StoreUnavailable("503", subject="pack")

    def get_range_into(self, key: str, start: int, target: memoryview) -> None:
        if self.error is not None:
            raise self.error
        super().get_range_into(key, start, target)


@pytest.fixture
def failing() -> Failing:
    return Failing("cached")


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier(1 << 20)


@contextlib.contextmanager
def a_rank(answer: Callable[[Connection], object], **limits: float) -> Iterator[NodeCacheStore]:
    """Yield the store of a rank whose reads from the store succeed. ``answer`` is what its node worker does with a connection."""
    listener = Listener(f"raystow-test-{SYSTEM.token()}")

    def serve() -> None:
        connection = listener.accept()
        assert connection is not None
        connection.handshake("the rank")
        answer(connection)
        connection.close()

    serving = threading.Thread(target=serve)
    serving.start()
    store = MemoryStore("cached")
    store.put("pack", [b"bytes"])
    cached = NodeCacheStore(store, listener.name, "r", **limits)
    cached.location = lambda key: ObjectLocation(5)
    yield cached
    cached.close()
    serving.join(10)
    listener.close()


@pytest.fixture
def rank(failing: Failing, tier: MemoryTier) -> Iterator[NodeCacheStore]:
    """Return the store of a rank; the reads of its node worker fail. It reports each 10 ms that it reads."""
    fetcher = Fetcher(tier, NodePeers(), budget=1 << 20)

    def answer(connection: Connection) -> None:
        received = connection.receive(ReadCached)
        assert received is not None
        with fetcher.visit():
            serve_reads(connection, received[0], fetcher, lambda uri: failing, pending_after=0.01)

    with a_rank(answer) as cached:
        yield cached


@pytest.fixture
def frozen() -> Iterator[NodeCacheStore]:
    """Return the store of a rank whose node worker neither reads nor answers."""
    done = threading.Event()
    with a_rank(lambda connection: done.wait(60), patience=0.1) as cached:
        yield cached
        done.set()


def test_a_frozen_node_worker_is_given_up(frozen: NodeCacheStore, caplog: pytest.LogCaptureFixture) -> None:
    """It is not asked again: each request would take as long."""
    assert [bytes(frozen.get_range("pack", *span)) for span in ((0, 2), (2, 3))] == [b"by", b"tes"]
    assert frozen.read == {"store": 5}
    assert caplog.messages == ["pack is read without the node worker: the other process did not answer within 0.1 s"]


def test_a_slow_node_worker_is_waited_for(
    rank: NodeCacheStore, failing: Failing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Semaphore(0)

    def pending() -> Acknowledged:
        told.release()
        return Acknowledged()

    monkeypatch.setattr(cache_server, "Acknowledged", pending)
    failing.error = None
    failing.put("pack", [b"bytes"])
    read = failing.get_range_into

    def slow(key: str, start: int, target: memoryview) -> None:
        for _ in range(3):
            assert told.acquire(timeout=60)
        read(key, start, target)

    script(failing, get_range_into=slow)
    assert rank.get_range("pack", 0, 5) == b"bytes"
    assert not caplog.text, "the node worker returned the bytes"


def test_a_store_outage_is_not_waited_for_twice(rank: NodeCacheStore) -> None:
    with pytest.raises(StoreUnavailable, match="pack: the node worker could not read it from the store: pack: 503"):
        rank.get_range("pack", 0, 5)


def test_a_failed_read_leaves_no_memory_to_the_collector(failing: Failing, tier: MemoryTier) -> None:
    """A node worker makes few objects that the collector counts: it may not run for hours."""
    before, fetcher = opened(), Fetcher(tier, NodePeers(), budget=1 << 20)
    failing.error = StoreUnavailable("503", subject="pack")

    def answer(connection: Connection) -> None:
        received = connection.receive(ReadCached)
        assert received is not None
        with fetcher.visit():
            serve_reads(connection, received[0], fetcher, lambda uri: failing)

    gc.disable()
    try:
        with a_rank(answer) as rank, contextlib.suppress(StoreUnavailable):
            rank.get_range("pack", 0, 5)
        failing.error = None
        assert not opened() - before
    finally:
        gc.enable()


def test_a_rank_reads_objects_denied_to_its_node_worker(rank: NodeCacheStore, failing: Failing) -> None:
    failing.error = StoreError("403", subject="pack")
    assert rank.get_range("pack", 0, 5) == b"bytes"
    assert rank.read == {"store": 5}


def test_a_whole_cached_object_is_requested_once(rank: NodeCacheStore, tier: MemoryTier) -> None:
    tier.put(AttemptKey("r", 1, "a"), 0, "pack", [memoryview(b"hello")])
    target = bytearray(3)
    rank.get_range_into("pack", 0, memoryview(target))
    tier.close()  # the rank still has the object mapped
    assert bytes(rank.get_range("pack", 2, 3)) == b"llo"
    rank.get_range_into("pack", 1, memoryview(target))
    assert (target, rank.read) == (b"ell", {"memory": 9})


def descriptors_of_memory() -> int:
    """Return how many descriptors of this process are of memory; other tests' threads open and close others."""
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(descriptor).startswith("/memfd:")
    return count


def test_the_objects_used_last_stay_open(rank: NodeCacheStore, tier: MemoryTier) -> None:
    """A version has hundreds of packs, each of which is read in several ranges."""
    rank.location = lambda key: ObjectLocation(3)
    keys, target = [f"pack {i}" for i in range(3 * HELD)], bytearray(1)
    for key in keys:
        tier.put(AttemptKey("r", 1, "a"), 0, key, [b"abc"])
    before = descriptors_of_memory()
    for key in keys:
        rank.get_range_into(key, 0, memoryview(target))
    assert descriptors_of_memory() - before <= HELD
    tier.close()
    rank.get_range_into(keys[-1], 2, memoryview(target))
    assert (target, rank.read) == (b"c", {"memory": len(keys) + 1})


def test_a_partly_cached_object_is_requested_for_each_range(
    rank: NodeCacheStore, failing: Failing, caplog: pytest.LogCaptureFixture
) -> None:
    failing.error = None
    failing.put("pack", [b"bytes"])
    assert [bytes(rank.get_range("pack", *span)) for span in ((0, 2), (2, 3))] == [b"by", b"tes"]
    assert rank.read == {"store": 5}
    assert not caplog.text, "the node worker returned both ranges"


def test_a_repeated_read_of_cached_bytes_uses_the_store(rank: NodeCacheStore, tier: MemoryTier) -> None:
    """A repeated request means that the first answer was wrong."""
    tier.put(AttemptKey("r", 1, "a"), 0, "pack", [memoryview(b"wrong")])
    assert [bytes(rank.get_range("pack", 0, 5)) for _ in range(2)] == [b"wrong", b"bytes"]
    assert rank.read == {"memory": 5, "store": 5}


def test_one_request_finds_all_packs_of_a_ring(failing: Failing) -> None:
    """The slots are free after the lease: a reader that asks for nothing more may be frozen."""
    tier, free, size = MemoryTier(1 << 20), list[int](), mmap.PAGESIZE
    ring = Slots(Ring.create(2 * size, size, keep=4 * size), free.extend)
    assert tier.admit(ring)
    key = AttemptKey("r", 1, "0" * 16)
    names = [keys.pack(1, key.token, 0, "weights", number) for number in range(4)]
    for number, name in enumerate(names):
        ring.ring.slot(number)[:] = number
        views, use = ring.take_over([(number, 0, size)])
        assert tier.put(key, 0, name, views, uses=[use]) is None
        ring.filled([number])
        use()
    requests = list[str]()

    class Counted(Fetcher):
        def kept(self, request: ReadCached, read: Counter[str]) -> tuple[LentMemory, bool] | None:
            requests.append(request.key)
            return super().kept(request, read)

    fetcher = Counted(tier, NodePeers(), budget=1 << 20)

    def answer(connection: Connection) -> None:
        received = connection.receive(ReadCached)
        assert received is not None
        serve_reads(connection, received[0], fetcher, lambda uri: failing, lease=0.01)

    with a_rank(answer) as rank:
        rank.location = lambda key: ObjectLocation(size)
        assert [bytes(rank.get_range(name, 5, 9)) for name in names] == [bytes([number]) * 9 for number in range(4)]
        tier.close()
        wait_until(lambda: sorted(free) == [0, 1, 2, 3], "the slots are free, though the reader is connected")
    assert requests == names[:1]
