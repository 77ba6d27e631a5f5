"""Journal entries in the memory of a node, and their copies on partner nodes."""

from __future__ import annotations

from collections.abc import Mapping

from helpers.fake_clock import FakeClock
from msgspec.structs import replace

from raystow.storage.errors import ClusterError
from raystow.workers.journal.entry_replicator import EntryReplicator
from raystow.workers.journal.entry_store import EntryStore
from raystow.workers.protocol.messages import EntryInfo, EntryKept, Generation, PutEntry

SIZE = 100
FIRST = (Generation("1", 0),)
SECOND = (Generation("2", 1),)


def entry(step: int, rank: int = 0, lineage: tuple[Generation, ...] = FIRST) -> EntryInfo:
    return EntryInfo("r", rank, 2, step, step - 1, lineage, SIZE)


def add(store: EntryStore, info: EntryInfo, *, own: bool = True) -> str:
    return store.add(info, bytes(info.size), own=own)


def steps(store: EntryStore) -> list[int]:
    return [info.step for info in store.own()]


def test_a_full_memory_refuses_new_entries_until_a_save() -> None:
    store = EntryStore(3 * SIZE)
    assert [add(store, entry(step)) for step in (1, 2, 3)] == ["", "", ""]
    assert "is full" in add(store, entry(4))
    assert steps(store) == [1, 2, 3]
    store.save_begun("r", 4, FIRST[0])
    assert add(store, entry(5)) == ""
    assert steps(store) == [2, 3, 5]
    store.committed("r", 4)
    assert steps(store) == [5]
    assert store.used == SIZE


def test_a_save_that_has_ended_makes_no_entry_unnecessary() -> None:
    """One has failed, another one was under way when the training went back to step 0."""
    store = EntryStore(2 * SIZE)
    for step in (1, 2):
        add(store, entry(step))
    store.save_begun("r", 2, FIRST[0])
    store.save_failed("r", 2)
    assert "is full" in add(store, entry(3))
    store.save_begun("r", 9, FIRST[0])
    assert [add(store, entry(step, lineage=SECOND)) for step in (1, 2)] == ["", ""]
    assert "is full" in add(store, entry(3, lineage=SECOND))
    assert steps(store) == [1, 2]


def test_copies_are_kept_after_a_return_to_an_older_step() -> None:
    """The version of step 3 is durable; then the training goes on from step 0, and later from a version of step 4."""
    store, partner = EntryStore(10 * SIZE), EntryStore(10 * SIZE)
    third = (*SECOND, Generation("3", 5))
    add(store, entry(3))
    store.committed("r", 3)
    for step, lineage in ((1, SECOND), (4, SECOND), (5, third)):
        new = entry(step, lineage=lineage)
        add(store, new)
        partner.drop_before(new, store.oldest(new))
        add(partner, new, own=False)
    assert len(partner.holdings("r")) == 3
    store.committed("r", 4)
    partner.drop_before(new, store.oldest(new))
    assert partner.holdings("r") == (new,)


def test_entries_of_other_repositories_are_evicted() -> None:
    store = EntryStore(2 * SIZE)
    add(store, replace(entry(1), repository="old"))
    add(store, entry(1))
    assert "is full" in store.problem(replace(entry(2), size=3 * SIZE))
    assert len(store.holdings("old")) == 1, "nothing is dropped for an entry that does not fit at all"
    assert add(store, entry(2)) == ""
    assert store.holdings("old") == ()


def test_repeated_steps_replace_those_of_the_old_generation() -> None:
    store = EntryStore(10 * SIZE)
    for step in (1, 2, 3, 4):
        add(store, entry(step))
    add(store, entry(3, lineage=(*FIRST, Generation("2", 3))))
    assert [(info.step, info.generation.token) for info in store.own()] == [(1, "1"), (2, "1"), (3, "2")]
    add(store, entry(4))  # arrives late
    assert sorted((info.step, info.generation.token) for info in store.own())[:2] == [(1, "1"), (2, "1")]


def test_a_restarted_node_keeps_the_last_copies_on_its_partner() -> None:
    """The restarted node has none of the old entries, whose last copies are on the partner, and sends a new entry."""
    partner, restarted = EntryStore(10 * SIZE), EntryStore(10 * SIZE)
    for step in (1, 2):
        add(partner, entry(step), own=False)
    add(restarted, entry(3))
    partner.drop_before(entry(3), restarted.oldest(entry(3)))
    assert len(partner.holdings("r")) == 2
    restarted.committed("r", 3)
    partner.drop_before(entry(3), restarted.oldest(entry(4)))
    assert partner.holdings("r") == ()


class OtherNodes:
    """The entry stores of other nodes by name. Nodes in ``down`` do not answer."""

    def __init__(self, *names: str) -> None:
        self.stores = {name: EntryStore(10 * SIZE) for name in names}
        self.down: set[str] = set()
        self.here = EntryStore(0)

    def nodes(self) -> Mapping[str, str]:
        return {"here": "here", **{name: name for name in self.stores if name not in self.down}}

    def put_entry(self, node: str, put: PutEntry) -> EntryKept:
        if node in self.down:
            raise ClusterError("does not answer", subject=node)
        self.stores[node].drop_before(put.info, put.oldest)
        data = self.here.view(put.info)
        assert put.holder == "here"
        assert data is not None
        problem = self.stores[node].add(put.info, data, own=False)
        return EntryKept(put.info.step, 1, problem, memory=f"{id(self.stores[node])}")

    def steps(self, node: str) -> list[int]:
        return sorted(info.step for info in self.stores[node].holdings("r"))


def replicator(store: EntryStore, peers: OtherNodes) -> tuple[EntryReplicator, FakeClock]:
    clock, peers.here = FakeClock(), store
    made = EntryReplicator("here", store, peers, clock)
    made.want("r", 1)
    return made, clock


def settle(made: EntryReplicator) -> None:
    for _ in range(100):
        if made.step() > 0:
            return
    raise AssertionError("the replicator does not become idle")


def test_an_entry_is_acknowledged_once_it_has_its_copy() -> None:
    store, peers = EntryStore(10 * SIZE), OtherNodes("a", "b")
    made, _ = replicator(store, peers)
    done = list[EntryKept]()
    for step in (1, 2):
        add(store, entry(step))
        made.submit(entry(step), done.append)
    settle(made)
    assert done == [EntryKept(1, 1), EntryKept(2, 1)]
    (partner,) = [node for node in ("a", "b") if peers.steps(node)]
    assert peers.steps(partner) == [1, 2]
    store.committed("r", 1)
    add(store, entry(3))
    made.submit(entry(3), done.append)
    settle(made)
    assert peers.steps(partner) == [2, 3]


def test_another_partner_gets_all_entries_if_one_dies() -> None:
    store, peers = EntryStore(10 * SIZE), OtherNodes("a", "b")
    made, _ = replicator(store, peers)
    done = list[EntryKept]()
    for step in (1, 2):
        add(store, entry(step))
        made.submit(entry(step), done.append)
    settle(made)
    (partner,) = [node for node in ("a", "b") if peers.steps(node)]
    peers.down.add(partner)
    add(store, entry(3))
    made.submit(entry(3), done.append)
    settle(made)
    (other,) = {"a", "b"} - {partner}
    assert peers.steps(other) == [1, 2, 3]
    peers.down.add(other)
    add(store, entry(4))
    made.submit(entry(4), done.append)
    settle(made)
    assert done[-1] == EntryKept(4, 0), "without a partner an entry is acknowledged without a copy"


def test_an_entry_that_its_partner_refuses_is_a_problem() -> None:
    """The partner gets it when it has memory again."""
    store, peers = EntryStore(10 * SIZE), OtherNodes("a")
    peers.stores["a"] = EntryStore(2 * SIZE)
    made, _ = replicator(store, peers)
    done = list[EntryKept]()
    for step in (1, 2, 3):
        add(store, entry(step))
        made.submit(entry(step), done.append)
        settle(made)
    assert done[:2] == [EntryKept(1, 1), EntryKept(2, 1)]
    assert done[2].copies == 0
    assert "node a keeps no copy: the memory for entries of recorded steps is full" in done[2].problem
    store.committed("r", 1)
    made.freed()
    settle(made)
    assert peers.steps("a") == [2, 3]


def test_a_restarted_partner_receives_all_entries_again() -> None:
    store, peers = EntryStore(10 * SIZE), OtherNodes("a")
    made, _ = replicator(store, peers)
    for step in (1, 2, 3):
        add(store, entry(step))
        if step == 3:
            peers.stores["a"] = EntryStore(10 * SIZE)
        made.submit(entry(step), lambda _: None)
        settle(made)
    assert peers.steps("a") == [1, 2, 3]
