"""Copies on other nodes: they are made, completed, reported, and made again after the loss of a node."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence

import pytest
from helpers.fake_clock import FakeClock

from raystow.storage.errors import ClusterError
from raystow.storage.format import keys
from raystow.storage.object_store import Buffer
from raystow.storage.runtime import background
from raystow.workers.cache.tier import MemoryTier
from raystow.workers.protocol.messages import AttemptKey, Holding, NodePart, Replica
from raystow.workers.replication.partners import partners
from raystow.workers.replication.replica_store import ReplicaStore
from raystow.workers.replication.replicator import Replicator

KIB = 1 << 10


def attempt_key(id: int) -> AttemptKey:
    return AttemptKey("r", id, f"{id:016x}")


class Member:
    """A node: its memory and the keys of the objects that it received. If ``frozen``, it does not answer."""

    def __init__(self, world: ReplicaNodes, name: str, *, budget: int, zone: str = "") -> None:
        self.name, self.zone, self.frozen = name, zone, False
        self.received: list[str] = []
        self.tier = MemoryTier(budget)
        self.replicas = ReplicaStore(self.tier)
        self.replicator = Replicator(name, self.tier, world, world.clock)

    def make(self, id: int, number: int, *, packs: int = 2, size: int = KIB, sealed: bool = True) -> None:
        """Store the objects of a save that this node, number ``number`` in the attempt, writes."""
        where = attempt_key(id)
        for i in range(packs):
            self.tier.put(where, number, keys.pack(id, where.token, number, "weights", i), [bytes([i]) * size])
        if sealed:
            self.tier.put(where, number, keys.fragment(id, where.token, number), [b"fragment"])

    def give_up(self, id: int) -> None:
        """Give up an attempt that will not become a version."""
        self.tier.given_up(attempt_key(id))
        self.replicator.give_up(attempt_key(id))

    def whole(self, id: int) -> set[int]:
        return next((held.whole for held in self.tier.holdings("r") if held.attempt == attempt_key(id)), set())


class ReplicaNodes:
    """Nodes that call each other directly. Dead nodes are not in ``members``."""

    def __init__(self, *names: str, budget: int = 100 * KIB, replicas: int = 1, zones: str = "") -> None:
        self.clock = FakeClock()
        self.members: dict[str, Member] = {}
        for i, name in enumerate(names):
            self.add(name, budget=budget, replicas=replicas, zone=zones[i : i + 1])

    def add(self, name: str, *, budget: int = 100 * KIB, replicas: int | None = 1, zone: str = "") -> Member:
        member = self.members[name] = Member(self, name, budget=budget, zone=zone)
        if replicas is not None:
            member.replicator.want("r", replicas, None)
        return member

    def settle(self, seconds: float = 120.0) -> None:
        """Run the replication of all nodes for ``seconds``."""
        until = self.clock.time + seconds
        while self.clock.time < until:
            for member in list(self.members.values()):
                while not member.frozen and member.replicator.step() == 0:
                    pass
            self.clock.time += 1.0

    def holders(self, id: int, number: int) -> set[str]:
        return {name for name, member in self.members.items() if number in member.whole(id)}

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    def nodes(self) -> Mapping[str, str]:
        return {name: member.zone for name, member in self.members.items()}

    def holdings(self, node: str, repository: str) -> Sequence[Holding]:
        return self._answering(node).tier.holdings(repository)

    def accept(self, node: str, copy: Replica, data: Buffer) -> NodePart:
        self._answering(node).received.append(copy.key)
        return self[node].replicas.accept(copy, data)

    def committed(self, node: str, attempt: AttemptKey) -> None:
        self._answering(node).replicas.committed(attempt)

    def given_up(self, node: str, attempt: AttemptKey) -> None:
        self._answering(node).replicas.given_up(attempt)

    def _answering(self, node: str) -> Member:
        if node not in self.members or self.members[node].frozen:
            raise ClusterError("does not answer", subject=node)
        return self.members[node]


def test_a_copy_is_complete_once_its_last_object_arrives():
    """Each object is sent once."""
    world = ReplicaNodes("a", "b")
    world["a"].make(1, 0, sealed=False)
    world.settle()
    assert len(world["b"].received) == 2
    assert world.holders(1, 0) == set()
    world["a"].make(1, 0, packs=0)
    world.settle()
    assert world.holders(1, 0) == {"a", "b"}
    assert len(world["b"].received) == 3
    assert world["b"].received[-1] == keys.fragment(1, attempt_key(1).token, 0)
    assert world["a"].replicator.progress.present == world["a"].replicator.progress.wanted == 2 * KIB + 8
    for key, size in world["a"].tier.holdings("r")[0].parts[0].objects.items():
        assert world["b"].tier.view("r", key) == world["a"].tier.view("r", key)
        assert size == len(world["b"].tier.view("r", key) or b"")


def test_a_fragment_without_its_packs_is_refused():
    world = ReplicaNodes("a")
    where = attempt_key(1)
    pack, fragment = keys.pack(1, where.token, 0, "weights", 0), keys.fragment(1, where.token, 0)
    replicas = world["a"].replicas
    assert replicas.accept(Replica(where, 0, fragment, 8, ("b", "a"), (pack,)), b"fragment").objects == {}
    replicas.accept(Replica(where, 0, pack, 4, ("b", "a")), b"pack")
    assert world.holders(1, 0) == set()
    replicas.accept(Replica(where, 0, fragment, 8, ("b", "a"), (pack,)), b"fragment")
    assert world.holders(1, 0) == {"a"}


def test_zero_replicas_make_no_copies():
    world = ReplicaNodes("a", "b", replicas=0)
    world["a"].make(1, 0)
    world.settle()
    assert world["b"].received == []


def test_copies_are_dropped_with_their_originals():
    world = ReplicaNodes("a", "b")
    world["a"].make(1, 0)
    world.settle()
    world["a"].tier.committed(attempt_key(1))
    world["a"].make(2, 0)
    world.settle()
    assert (world.holders(1, 0), world.holders(2, 0)) == ({"a", "b"}, {"a", "b"})
    assert [held.committed for held in world["b"].tier.holdings("r")] == [True, False]
    world["a"].tier.committed(attempt_key(2))
    world.settle()
    assert (world.holders(1, 0), world.holders(2, 0)) == (set(), {"a", "b"})
    world["a"].make(3, 0, sealed=False)
    world.settle()
    world["a"].give_up(3)
    world.settle()
    assert world["b"].tier.used == world["a"].tier.used == 2 * KIB + 8


def test_a_node_keeps_its_own_parts_if_another_gives_up():
    world = ReplicaNodes("a", "b")
    world["a"].make(1, 0)
    world["b"].make(1, 1)
    world.settle()
    world["a"].give_up(1)
    world.settle()
    assert world["b"].whole(1) == {0, 1}
    assert [held.given_up for held in world["b"].tier.holdings("r")] == [False]


def test_an_aborted_staged_save_is_copied():
    world = ReplicaNodes("a", "b", "c")
    for number, name in enumerate("abc"):
        world[name].make(1, number)
    world.settle()
    del world.members["c"]
    for name in "ab":
        world[name].give_up(1)
    world.settle()
    assert [world.holders(1, number) for number in range(3)] == [{"a", "b"}] * 3
    world.add("d")
    world["b"].tier.close()
    del world.members["b"]
    world.settle()
    assert [world.holders(1, number) for number in range(3)] == [{"a", "d"}] * 3
    assert [held.given_up for held in world["d"].tier.holdings("r")] == [True]
    world["a"].make(2, 0)
    world["a"].tier.committed(attempt_key(2))
    world.settle()
    assert world.holders(1, 2) == set()
    assert world.holders(2, 0) == {"a", "d"}


def test_a_replaced_attempt_is_not_sent_again():
    world = ReplicaNodes("a")
    world.add("b", replicas=0)
    world["b"].make(2, 0)
    world["b"].give_up(2)
    world["a"].make(1, 0)
    world["a"].give_up(1)
    world.settle()
    assert (world.holders(1, 0), world.holders(2, 0)) == ({"a"}, {"b"})


def test_copies_of_a_dead_node_are_made_again(caplog):
    caplog.set_level(logging.INFO, "raystow.workers.replication.replicator")
    world = ReplicaNodes("a", "b", "c")
    for number, name in enumerate("abc"):
        world[name].make(1, number)
    world.settle()
    assert all(len(world.holders(1, number)) == 2 for number in range(3))
    caplog.clear()
    for dead in ("a", "b"):
        del world.members[dead]
        world.settle()
        alive = set(world.members)
        for number in range(3):
            assert world.holders(1, number) <= alive
            assert len(world.holders(1, number)) == min(2, len(alive))
    progress = world["c"].replicator.progress
    assert (progress.present, progress.wanted, progress.partners) == (0, 3 * (2 * KIB + 8), ())
    assert "copies on other nodes are incomplete: 0 of 6168 bytes" in caplog.text
    caplog.clear()
    world.add("d")
    world.settle()
    assert [world.holders(1, number) for number in range(3)] == [{"c", "d"}] * 3
    assert caplog.text.count("copies on other nodes are complete: 6168 of 6168 bytes") == 1


def test_a_successor_without_own_saves_makes_each_copy_once():
    world = ReplicaNodes("a")
    for name in "bcd":
        world.add(name, replicas=None)
    world["a"].make(1, 0)
    world.settle()
    del world.members["a"]
    world.settle()
    assert len(world.holders(1, 0)) == 2
    assert sorted(len(world[name].received) for name in "bcd") == [0, 3, 3]


def test_parts_of_a_worker_restarted_empty_are_copied_again():
    world = ReplicaNodes("a", "b", "c")
    world["a"].make(1, 0)
    world.settle()
    (copy,) = world.holders(1, 0) - {"a"}
    world.add("a")
    world.settle()
    assert copy in world.holders(1, 0)
    assert len(world.holders(1, 0)) == 2
    del world.members[copy]
    world.settle()
    assert len(world.holders(1, 0)) == 2


def test_a_partner_restarted_empty_receives_its_copies_again():
    world = ReplicaNodes("a", "b")
    world["a"].make(1, 0)
    world.settle()
    world.add("b")
    world.settle()
    assert world.holders(1, 0) == {"a", "b"}


@pytest.mark.parametrize(("restarted", "replaced"), [*itertools.permutations("abc", 2)])
def test_two_replicas_are_complete_after_two_failures(restarted: str, replaced: str) -> None:
    """The worker of one node is restarted empty, and later another node is replaced."""
    world = ReplicaNodes("a", "b", "c", replicas=2)
    for number, name in enumerate("abc"):
        world[name].make(1, number)
    world.settle()
    world.add(restarted, replicas=2)
    world.settle()
    del world.members[replaced]
    world.add("d", replicas=2)
    world.settle()
    assert [len(world.holders(1, number)) for number in range(3)] == [3, 3, 3]


def test_a_partner_that_does_not_answer_is_replaced(caplog):
    world = ReplicaNodes("a", "b", "c")
    (partner,) = partners(world.nodes(), 1)["a"]
    world[partner].frozen = True
    world["a"].make(1, 0)
    world.settle(20)
    assert len(world.holders(1, 0) - {partner}) == 2
    assert caplog.text.count("no copies go to a node that does not answer") == 1
    world[partner].frozen = False
    world.settle()
    assert partner in world.holders(1, 0)


def test_two_replicas_are_placed_in_other_zones():
    world = ReplicaNodes(*"abcdef", replicas=2, zones="xxyyzz")
    world["a"].make(1, 0)
    world.settle()
    assert {world[name].zone for name in world.holders(1, 0)} == {"x", "y", "z"}


def test_a_copy_that_did_not_fit_is_retried_after_a_commit(caplog):
    world = ReplicaNodes("a")
    world.add("b", budget=3 * KIB)
    world["b"].make(1, 1, packs=1)
    world["b"].tier.committed(attempt_key(1))
    world["a"].make(2, 0)
    world.settle()
    assert world.holders(2, 0) == {"a"}
    assert caplog.text.count("node b has no memory for a copy of version 2") == 1
    assert len(world["b"].received) == 2
    assert world["b"].tier.used == KIB + 8  # the copies of the incomplete part were released
    world["b"].make(2, 1, packs=0)
    world["a"].tier.committed(attempt_key(2))
    world["b"].tier.committed(attempt_key(2))
    world.settle()
    assert world.holders(2, 0) == {"a", "b"}


def test_copies_are_evicted_for_the_own_objects_of_a_node():
    world = ReplicaNodes("a")
    world.add("b", budget=4 * KIB)
    world["a"].make(1, 0)
    world["a"].tier.committed(attempt_key(1))
    world.settle()
    assert world.holders(1, 0) == {"a", "b"}
    world["b"].make(2, 0, packs=3)
    assert world["b"].whole(2) == {0}
    assert world.holders(1, 0) == {"a"}
    sent = len(world["b"].received)
    world.settle()
    assert len(world["b"].received) == sent


def test_an_object_that_did_not_fit_locally_is_not_sent():
    world = ReplicaNodes("a", budget=KIB)
    world.add("b")
    world["a"].make(1, 0)
    world.settle()
    assert world["b"].received == []


def test_a_copy_of_a_replaced_version_is_refused():
    world = ReplicaNodes("a")
    world.add("b", replicas=0)
    world["b"].make(2, 0)
    world["b"].tier.committed(attempt_key(2))
    world["a"].make(1, 0)
    world.settle()
    assert (world.holders(1, 0), world.holders(2, 0)) == ({"a"}, {"b"})


def difference(member: Member, id: int, base: int) -> None:
    """Commit a version that a node stores as a delta to version ``base``."""
    member.tier.set_base(attempt_key(id), attempt_key(base))
    member.make(id, 0)
    member.tier.committed(attempt_key(id))


def test_the_base_of_a_version_is_copied_with_it():
    world = ReplicaNodes("a", "b")
    world["a"].make(1, 0)
    world["a"].tier.committed(attempt_key(1))
    for id in (2, 3):
        difference(world["a"], id, base=1)
        world.settle()
        assert [world.holders(i, 0) for i in (1, id)] == [{"a", "b"}] * 2
    world.add("b")  # restarted empty
    world.settle()
    assert [world.holders(id, 0) for id in (1, 2, 3)] == [{"a", "b"}, set(), {"a", "b"}]
    del world.members["a"]
    world.add("c", replicas=None)
    world.settle()
    assert [world.holders(id, 0) for id in (1, 3)] == [{"b", "c"}] * 2, "node b takes over both versions"
    world["b"].make(4, 0)
    world["b"].tier.committed(attempt_key(4))
    world.settle()
    assert [world.holders(id, 0) for id in (1, 3, 4)] == [set(), set(), {"b", "c"}], "no kept version is a delta to version 1"


def test_a_delta_base_may_arrive_after_its_version():
    world = ReplicaNodes("a", "b")
    world["a"].make(1, 0)
    world["a"].tier.committed(attempt_key(1))
    difference(world["a"], 2, base=1)
    world["b"].replicas.accept(
        copy := Replica(attempt_key(2), 0, "first", 14, ("a", "b"), base=attempt_key(1)), b"it came before"
    )
    world["b"].tier.committed(copy.attempt)
    world.settle()
    assert world.holders(1, 0) == {"a", "b"}


def test_copies_are_sent_within_the_rate_limit():
    world = ReplicaNodes("a", "b", replicas=0)
    world["a"].make(1, 0, packs=8)
    world["a"].replicator.want("r", 1, rate=KIB / 10)
    world.settle(65)
    assert 6 <= len(world["b"].received) <= 7
    world.settle()
    assert world.holders(1, 0) == {"a", "b"}


def test_an_unexpected_error_does_not_end_the_thread(caplog):
    world = ReplicaNodes("a")
    replicator = world["a"].replicator

    def failing() -> Mapping[str, str]:
        replicator.close()
        raise ZeroDivisionError

    world.nodes = failing  # type: ignore[method-assign]
    background.repeat("raystow-copies", replicator.run).join(30)
    assert "an error in the thread raystow-copies, which goes on" in caplog.text
    assert not replicator.run()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_attempt_given_up_during_its_copy_is_released(moment):
    world = ReplicaNodes("a", "b")
    world["a"].make(1, 0, packs=4, sealed=False)
    world["a"].replicator.step()
    accept = world.accept

    def give_up(node: str, copy: Replica, data: Buffer) -> NodePart:
        part = accept(node, copy, data) if moment == "before" else NodePart()
        world["a"].give_up(1)
        return part if moment == "before" else accept(node, copy, data)

    world.accept = give_up  # type: ignore[method-assign]
    world.settle()
    assert world["a"].tier.used == world["b"].tier.used == 0
