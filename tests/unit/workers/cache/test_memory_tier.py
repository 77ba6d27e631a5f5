"""Versions that a node keeps in memory, and their eviction."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from mmap import PAGESIZE

import pytest
from helpers.pack_memory import opened

from raystow.storage.format import keys
from raystow.workers.cache import pack_file
from raystow.workers.cache.tier import MemoryTier
from raystow.workers.protocol.messages import AttemptKey, NodePart
from raystow.workers.shm.ring import Ring
from raystow.workers.shm.slots import Slots

KIB = 1 << 10


def attempt_key(id: int, repository: str = "r") -> AttemptKey:
    return AttemptKey(repository, id, f"{id:016x}")


def read(tier: MemoryTier, key: str, repository: str = "r") -> bytes | None:
    lent = tier.lend(repository, key)
    if lent is None:
        return None
    with open(lent.descriptor, "rb") as file:
        return file.read()


def ids(tier: MemoryTier, repository: str = "r") -> list[int]:
    return [holding.attempt.id for holding in tier.holdings(repository)]


@pytest.fixture
def tier():
    before = opened()
    tier = MemoryTier(10 * KIB)
    yield tier
    tier.close()
    assert tier.used == 0
    assert not opened() - before


def test_stored_objects_are_read_back_unchanged(tier):
    assert tier.put(attempt_key(1), 0, "a", [b"one", bytearray(b"two"), memoryview(b"three")[1:]]) is not None
    assert tier.put(attempt_key(1), 0, "empty", []) is not None
    assert (read(tier, "a"), read(tier, "empty"), read(tier, "b")) == (b"onetwohree", b"", None)
    assert read(tier, "a", "another repository") is None
    (holding,) = tier.holdings("r")
    assert (holding.parts, holding.committed) == ({0: NodePart({"a": 10, "empty": 0})}, False)


def test_returned_holdings_do_not_change_later(tier):
    tier.put(attempt_key(1), 0, "a", [b"one"])
    (before,) = tier.holdings("r")
    tier.put(attempt_key(1), 0, "b", [b"two"])
    tier.put(attempt_key(1), 3, "c", [b"three"], replica_order=("n", "m"))
    tier.committed(attempt_key(1))
    assert (before.committed, {number: part.objects for number, part in before.parts.items()}) == (False, {0: {"a": 3}})
    (after,) = tier.holdings("r")
    assert (after.committed, after.parts[0].replica_order, list(after.parts)) == (True, (), [0, 3])


def test_a_version_replaces_older_ones_and_aborted_saves(tier):
    for id in (1, 2, 3):
        tier.put(attempt_key(id), 0, f"pack {id}", [bytes(KIB)])
    tier.committed(attempt_key(1))
    tier.committed(attempt_key(3))
    tier.put(attempt_key(4), 0, "pack 4", [bytes(KIB)])
    assert ids(tier) == [3, 4]
    tier.given_up(attempt_key(4))
    assert (ids(tier), tier.used) == ([3], KIB)


def staged(tier: MemoryTier, id: int, *, size: int = KIB) -> None:
    """Store all objects that node 0 writes for an attempt."""
    where = attempt_key(id)
    tier.put(where, 0, keys.pack(id, where.token, 0, "weights", 0), [bytes(size)])
    tier.put(where, 0, keys.fragment(id, where.token, 0), [b"fragment"])


def test_a_staged_save_stays_until_a_newer_version_commits(tier):
    staged(tier, 1)
    tier.put(attempt_key(1), 3, "a part that is not whole", [bytes(KIB)])
    tier.given_up(attempt_key(1))
    (holding,) = tier.holdings("r")
    assert (holding.whole, set(holding.parts), holding.given_up) == ({0}, {0}, True)
    assert tier.used == KIB + 8
    staged(tier, 2)
    assert ids(tier) == [1, 2]
    tier.committed(attempt_key(2))
    assert ids(tier) == [2]


def test_delta_bases_stay_as_long_as_their_versions(tier):
    for id in (1, 2, 3):
        staged(tier, id)
        if id > 1:
            tier.set_base(attempt_key(id), attempt_key(1))
        tier.committed(attempt_key(id))
    assert ids(tier) == [1, 3]
    tier.set_base(attempt_key(4), attempt_key(1))
    staged(tier, 5)
    tier.committed(attempt_key(5))
    assert ids(tier) == [5], "attempt 4 stored no objects"
    tier.set_base(attempt_key(6), attempt_key(2))
    assert ids(tier) == [5], "a base that was evicted is not kept"
    tier.set_base(attempt_key(7), attempt_key(5))
    staged(tier, 7)
    tier.committed(attempt_key(7), alone=True)
    assert ids(tier) == [7], "version 7 has no deltas"


def test_bases_are_evicted_for_own_objects_but_not_for_copies(tier, caplog):
    """The newest version is never evicted."""
    staged(tier, 1, size=4 * KIB)
    tier.committed(attempt_key(1))
    tier.set_base(attempt_key(2), attempt_key(1))
    assert tier.put(attempt_key(2), 0, "too large", [bytes(7 * KIB)]) is None
    staged(tier, 2, size=3 * KIB)
    tier.committed(attempt_key(2))
    tier.set_base(attempt_key(3), attempt_key(1))
    assert tier.put(attempt_key(3), 1, "a copy", [bytes(4 * KIB)], replica_order=("b", "a")) is None
    assert ids(tier) == [1, 2, 3]
    staged(tier, 3, size=4 * KIB)
    assert ids(tier) == [2, 3]
    assert tier.holdings("r")[1].whole == {0}
    assert caplog.text.count("nothing is stored as a delta to version 1 from now on") == 1


def test_only_the_newest_aborted_save_stays(tier):
    for id in (1, 3, 2):
        staged(tier, id)
        tier.given_up(attempt_key(id))
    assert ids(tier) == [3]
    tier.put(attempt_key(4), 0, "half", [bytes(KIB)])
    tier.given_up(attempt_key(4))
    assert ids(tier) == [3]


def test_an_aborted_save_is_evicted_for_new_copies(tier):
    staged(tier, 1, size=4 * KIB)
    tier.committed(attempt_key(1))
    staged(tier, 2, size=4 * KIB)
    tier.given_up(attempt_key(2))
    tier.put(attempt_key(3), 1, "a copy", [bytes(KIB)], replica_order=("b", "a"))
    assert ids(tier) == [1, 2, 3]
    tier.put(attempt_key(3), 1, "a larger one", [bytes(2 * KIB)], replica_order=("b", "a"))
    assert ids(tier) == [1, 3]
    assert not any(part.incomplete for held in tier.holdings("r") for part in held.parts.values())


def test_giving_up_a_committed_version_has_no_effect(tier):
    staged(tier, 1)
    tier.committed(attempt_key(1))
    tier.given_up(attempt_key(1))
    assert [(held.committed, held.given_up) for held in tier.holdings("r")] == [(True, False)]


def test_the_newest_version_is_not_evicted_for_an_open_save(tier, caplog):
    tier.put(attempt_key(1), 0, "a", [bytes(6 * KIB)])
    tier.committed(attempt_key(1))
    assert tier.put(attempt_key(2), 0, "b", [bytes(4 * KIB)]) is not None
    assert tier.put(attempt_key(2), 3, "c", [bytes(1)]) is None
    assert tier.put(attempt_key(2), 3, "d", [bytes(1)]) is None
    assert caplog.text.count("version 2 is not kept whole in memory: 1 bytes more do not fit into 10240") == 1
    assert [(held.attempt.id, list(held.parts)) for held in tier.holdings("r")] == [(1, [0]), (2, [0, 3])]
    assert [part.incomplete for part in tier.holdings("r")[1].parts.values()] == [False, True]
    tier.committed(attempt_key(2))
    assert (ids(tier), tier.used) == ([2], 4 * KIB)


def test_repositories_do_not_replace_each_other(tier):
    tier.put(attempt_key(1, "r"), 0, "a", [bytes(KIB)])
    tier.put(attempt_key(9, "s"), 0, "a", [b"other"])
    tier.committed(attempt_key(1, "r"))
    tier.committed(attempt_key(9, "s"))
    assert (ids(tier, "r"), ids(tier, "s")) == ([1], [9])
    assert read(tier, "a", "s") == b"other"


def test_a_repository_without_new_saves_is_evicted_first(tier):
    for repository in ("r", "s", "t"):
        tier.put(attempt_key(1, repository), 0, "a", [bytes(3 * KIB)])
        tier.committed(attempt_key(1, repository))
    tier.put(attempt_key(2, "r"), 0, "b", [bytes(KIB)])
    assert tier.put(attempt_key(3, "t"), 0, "b", [bytes(2 * KIB)]) is not None
    assert (ids(tier, "r"), ids(tier, "s"), ids(tier, "t")) == ([1, 2], [], [1, 3])


def test_lent_memory_stays_valid_after_the_tier_closes():
    tier = MemoryTier(KIB)
    tier.put(attempt_key(1), 0, "a", [b"bytes"])
    lent = tier.lend("r", "a")
    tier.close()
    with open(lent.descriptor, "rb") as file:
        assert os.pread(file.fileno(), 5, 0) == b"bytes"


def test_an_object_stored_twice_counts_once(tier):
    tier.put(attempt_key(1), 0, "a", [bytes(KIB)])
    tier.put(attempt_key(1), 0, "a", [bytes(2 * KIB)])
    assert tier.used == 2 * KIB


@pytest.mark.parametrize("where", ["memfd_create", "mmap", "pwritev"])
def test_a_failed_copy_takes_nothing_of_the_budget(where, tier, monkeypatch):
    def fails(*_):
        raise OSError(errno.EMFILE, "injected")

    with monkeypatch.context() as broken:
        broken.setattr(pack_file.mmap if where == "mmap" else pack_file.os, where, fails)
        with pytest.raises(OSError, match="injected"):
            tier.put(attempt_key(1), 0, "a", [bytes(10 * KIB)])
    assert tier.put(attempt_key(1), 0, "a", [bytes(10 * KIB)]) is not None


def test_memory_of_a_version_is_reused_within_the_budget():
    before, tier = opened(), MemoryTier(2500)
    for id in (1, 2, 3):
        assert tier.put(attempt_key(id), 0, f"pack{id}", [bytes([id]) * 1000]) == bytes([id]) * 1000
        tier.committed(attempt_key(id))
        assert tier.used == 1000
    assert (opened() - before).total() == 4  # two allocations, each with the descriptor of the memory and of its mapping
    tier.resize(1500)  # too small for the unused allocation
    assert (opened() - before).total() == 2
    tier.close()
    assert not opened() - before


def admitted(tier: MemoryTier, keep: int) -> tuple[Slots, list[int]]:
    """Make a ring that keeps ``keep`` slots of a page, and two more; return it, and the slots that become free."""
    free = list[int]()
    ring = Slots(Ring.create(2 * PAGESIZE, PAGESIZE, keep=keep * PAGESIZE), free.extend)
    assert tier.admit(ring)
    return ring, free


def put_in_ring(tier: MemoryTier, ring: Slots, id: int, slots: Sequence[int]) -> None:
    """Put an object for each slot, whose page it is."""
    for slot in slots:
        views, use = ring.take_over([(slot, 0, PAGESIZE)])
        tier.put(attempt_key(id), 0, f"{id}-{slot}", views, uses=[use])
        ring.filled([slot])
        use()


def test_a_version_leaves_a_ring_as_the_next_fills_it() -> None:
    tier = MemoryTier(1 << 20)
    ring, free = admitted(tier, 5)
    assert ring.ring.slots == 7
    put_in_ring(tier, ring, 1, range(4))
    put_in_ring(tier, ring, 2, [4, 5])
    assert free == [5]  # 1 is no version yet, and stays: the second object of 2 is copied
    tier.committed(attempt_key(1))
    put_in_ring(tier, ring, 3, [5])
    assert [held.parts[0].incomplete for held in tier.holdings("r")] == [True, False, False]
    put_in_ring(tier, ring, 4, [6])
    assert free == [5, 0, 1]
    assert [[*held.parts[0].objects] for held in tier.holdings("r")] == [["1-2", "1-3"], ["2-4", "2-5"], ["3-5"], ["4-6"]]


def test_older_versions_make_way_for_what_will_come() -> None:
    tier = MemoryTier(1 << 20)
    ring, free = admitted(tier, 5)
    put_in_ring(tier, ring, 1, range(3))
    tier.committed(attempt_key(1))
    tier.make_way(ring, attempt_key(2), 2 * PAGESIZE)
    assert free == []
    tier.make_way(ring, attempt_key(2), 4 * PAGESIZE)
    assert free == [0, 1]
    put_in_ring(tier, ring, 2, [3, 4, 5, 6])
    assert free == [0, 1]
    assert [[*held.parts[0].objects] for held in tier.holdings("r")] == [["1-2"], ["2-3", "2-4", "2-5", "2-6"]]


def test_unchanged_objects_stay_longest_in_a_ring() -> None:
    tier = MemoryTier(1 << 20)
    ring, free = admitted(tier, 4)
    put_in_ring(tier, ring, 1, range(3))
    tier.committed(attempt_key(1))
    for id, slot in ((2, 3), (3, 4), (4, 5)):
        tier.set_base(attempt_key(id), attempt_key(1))
        put_in_ring(tier, ring, id, [slot])
        tier.committed(attempt_key(id))
        assert ids(tier, "r") == [1, id]
    assert free == [3, 4]
    assert not any(held.parts[0].incomplete for held in tier.holdings("r"))


def test_slots_that_readers_use_do_not_stop_a_ring() -> None:
    """A reader that is frozen never ends its use: what follows is copied, so that slots become free."""
    tier = MemoryTier(1 << 20)
    ring, free = admitted(tier, 2)
    put_in_ring(tier, ring, 1, [0, 1])
    tier.committed(attempt_key(1))
    lent = [tier.lend("r", f"1-{slot}") for slot in (0, 1)]
    put_in_ring(tier, ring, 2, [2, 3])
    assert free == [2, 3]
    for one in lent:
        assert one is not None
        one.close()
    assert free == [2, 3, 0, 1]
    put_in_ring(tier, ring, 3, [2])
    assert free == [2, 3, 0, 1]
