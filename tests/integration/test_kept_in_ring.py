"""Versions stay in the pinned ring that a GPU has filled. Restores read them there without a copy."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.coded_rank import CodedRank
from helpers.local_cluster import LocalCluster
from helpers.page_cache import page_cached
from helpers.polling import wait_until

import raystow
from raystow.storage.format import keys
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores import direct_io
from raystow.storage.versions.version import Version
from raystow.workers.cache.lent_memory import LentMemory
from raystow.workers.cache.node_cache_store import NodeCacheStore, ObjectLocation
from raystow.workers.cache.ring_pack import RingPack
from raystow.workers.shm.ring import SLOT, one_version

CHUNK, CHUNKS = 1 << 20, 16
SIZE = CHUNKS * CHUNK
SLOTS = SIZE // SLOT


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(f"memory://kept-in-ring-{SYSTEM.token()}") as cluster:
        yield cluster


def connected(cluster: LocalCluster, *, keep: int = 2 * SIZE, cache: int = 1 << 30, wrong: bool = False) -> CodedRank:
    return CodedRank(cluster, 0, 1, chunks=CHUNKS, chunk=CHUNK, slots=SLOTS, slot=SLOT, keep=keep, cache=cache, wrong=wrong)


def random_bytes(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)


def read_of(cluster: LocalCluster, version: Version) -> dict[str, int]:
    """Read all packs through the node, compare them with those of the store, and return the bytes read from each source."""
    cache = NodeCacheStore(version.store, cluster.address(0), cluster.repository.id)
    cache.location = lambda key: ObjectLocation(sizes[key])
    sizes = {keys.pack(version.id, version.attempt, pack.node, pack.group, pack.number): pack.size for pack in version.packs}
    assert sum(sizes.values()) == SIZE
    for key, size in sizes.items():
        stored = version.store.get(key, max_bytes=size)
        target = bytearray(size - 1000)
        cache.get_range_into(key, 1000, memoryview(target))
        assert target == stored[1000:]
        assert bytes(cache.get_range(key, 0, size)) == stored
    cache.close()
    return dict(cache.read)


def await_free_slots(rank: CodedRank, step: int) -> None:
    """Save from ``step`` on until only the newest version is in the ring."""
    steps = itertools.count(step)

    def free() -> bool:
        rank.save(next(steps), random_bytes(0))
        return len(rank.free) == rank.ring.slots - SLOTS

    wait_until(free, "all slots but those of the newest version are free")


def lent_pack(cluster: LocalCluster) -> tuple[LentMemory, list[int]]:
    """Return the memory of the only pack of the newest version, and the starts of its chunks in the order of the tensor."""
    version = cluster.repository.latest()
    (pack,) = version.packs
    lent = cluster.tier(0).lend(cluster.repository.id, keys.pack(version.id, version.attempt, pack.node, pack.group, pack.number))
    assert lent is not None
    return lent, [row.start for row in sorted(version.chunks["w0"], key=lambda row: row.offset)]


def content(lent: LentMemory, place: list[int]) -> bytes:
    """Return the bytes of chunks in lent memory, and close the memory."""
    found = [os.pread(lent.descriptor, size, at) for start in place for at, size in lent.spans(start, CHUNK)]
    lent.close()
    return b"".join(found)


def test_packs_of_the_ring_reach_a_disk_around_the_page_cache(tmp_path: Path) -> None:
    with LocalCluster(str(tmp_path)) as cluster:
        rank = connected(cluster)
        rank.save(1, random_bytes(0))
        rank.close()
    packs = list(tmp_path.rglob("*.pack"))
    assert sum(pack.stat().st_size for pack in packs) == SIZE
    if direct_io.refused(tmp_path.stat().st_dev) is None:
        assert not any(page_cached(pack) for pack in packs)


def test_a_wrong_digest_of_a_gpu_fails_the_save(cluster: LocalCluster) -> None:
    rank = connected(cluster, wrong=True)
    with pytest.raises(SystemExit, match=r"w0.*not those whose digest the GPU has computed"):
        rank.save(1, random_bytes(1))
    rank.close()


def test_a_version_stays_in_the_ring_without_a_copy(cluster: LocalCluster) -> None:
    rank = connected(cluster)
    rank.save(1, random_bytes(1))
    assert len(rank.free) == rank.ring.slots - SLOTS  # the others keep the version
    tier = cluster.tier(0)
    used = tier.used
    assert used >= SIZE
    rank.save(2, data := random_bytes(2))
    wait_until(lambda: tier.used < used + SIZE // 2, "the second version replaces the first")
    version = cluster.repository.latest()
    restored = {"w0": np.zeros(SIZE, np.uint8)}
    raystow.restore(version, restored)
    assert np.array_equal(restored["w0"], data)
    rank.close()
    assert read_of(cluster, version) == {"memory": 2 * SIZE - 1000}


def test_no_version_of_a_float32_state_is_copied(cluster: LocalCluster) -> None:
    keep = one_version(round(SIZE / 0.84))
    rank = CodedRank(cluster, 0, 1, chunks=CHUNKS, chunk=CHUNK, slots=CHUNKS, slot=CHUNK, keep=keep)
    for step in range(1, 5):
        rank.save(step, random_bytes(step))
        packs = [file for (_, key), file in cluster.tier(0)._files.items() if key.endswith(".pack")]
        assert packs
        assert all(isinstance(pack, RingPack) for pack in packs)
    rank.close()


def test_a_version_that_left_the_ring_is_restored_from_the_store(cluster: LocalCluster) -> None:
    """The rank dies during the next save, which took the place of the version."""
    rank = connected(cluster, keep=SIZE)
    rank.save(1, random_bytes(1))
    version = cluster.repository.latest()
    rank.die(2, random_bytes(2), chunks=2)
    tier, repository = cluster.tier(0), cluster.repository.id

    def left() -> bool:
        return any(part.incomplete for held in tier.holdings(repository) for part in held.parts.values())

    wait_until(left, "the version leaves the ring")
    assert read_of(cluster, version)["store"] >= SIZE


def test_a_frozen_reader_of_the_ring_stops_no_save(cluster: LocalCluster) -> None:
    rank = connected(cluster, keep=SIZE)
    rank.save(1, first := random_bytes(1))
    lent, place = lent_pack(cluster)
    for step in range(2, 5):
        rank.save(step, random_bytes(step))
    assert content(lent, place) == first.tobytes()
    rank.close()
    assert read_of(cluster, cluster.repository.latest()) == {"memory": 2 * SIZE - 1000}


def test_lent_slots_are_not_filled_until_the_reader_ends(cluster: LocalCluster) -> None:
    rank = connected(cluster)
    rank.save(1, first := random_bytes(1))
    lent, place = lent_pack(cluster)
    assert os.fstat(lent.descriptor).st_ino == os.fstat(rank.ring.fd).st_ino
    for step in range(2, 5):
        rank.save(step, random_bytes(step))  # all other slots are filled again
        assert len(rank.free) <= rank.ring.slots - 2 * SLOTS
    assert content(lent, place) == first.tobytes()
    await_free_slots(rank, 5)
    rank.close()


def test_lent_memory_is_unchanged_after_its_version_is_replaced(cluster: LocalCluster) -> None:
    """The ring belongs to a process that has ended, so its memory is lent without a copy."""
    rank = connected(cluster)
    rank.save(1, first := random_bytes(1))
    inode = os.fstat(rank.ring.fd).st_ino
    rank.close()
    (kept,) = (file for file in cluster.tier(0)._files.values() if isinstance(file, RingPack))
    wait_until(lambda: kept.slots.retired, "the ring is retired")
    lent, place = lent_pack(cluster)
    assert os.fstat(lent.descriptor).st_ino == inode
    assert lent.extents
    again = connected(cluster)
    again.save(2, random_bytes(2))
    wait_until(lambda: [held.attempt.id for held in cluster.tier(0).holdings(cluster.repository.id)] == [2], "it is replaced")
    assert content(lent, place) == first.tobytes()
    again.close()


def test_a_ring_keeps_at_most_its_limit(cluster: LocalCluster) -> None:
    """Half of a version stays in the ring, and the node worker copies the rest."""
    rank = connected(cluster, keep=SIZE // 2)
    for step in range(1, 4):
        rank.save(step, random_bytes(step))
        assert len(rank.free) >= 2
    rank.close()
    assert read_of(cluster, cluster.repository.latest()) == {"memory": 2 * SIZE - 1000}


def test_memory_of_a_process_that_died_is_freed(cluster: LocalCluster) -> None:
    """Slots without a version are freed immediately, the others after a newer version has replaced theirs."""
    rank = connected(cluster)
    rank.ring.memory[:] = 1
    rank.save(1, random_bytes(1))
    descriptor = os.dup(rank.ring.fd)
    rank.close()
    wait_until(lambda: os.fstat(descriptor).st_blocks * 512 == SIZE, "only the version stays")
    again = connected(cluster)
    again.save(2, random_bytes(2))
    wait_until(lambda: os.fstat(descriptor).st_blocks == 0, "all memory of the ring is free")
    again.close()
    os.close(descriptor)


def test_saves_are_copied_if_the_node_cannot_pin_enough(cluster: LocalCluster, caplog: pytest.LogCaptureFixture) -> None:
    rank = connected(cluster, cache=SIZE)
    assert rank.ring.kept == 0
    assert "saves are copied into this node's memory" in caplog.text
    rank.save(1, random_bytes(1))
    assert len(rank.free) == rank.ring.slots
    rank.close()
