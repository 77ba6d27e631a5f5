"""Collection: what it takes, what it leaves, and that nobody who is slow loses by it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fake_clock import FakeClock
from handmade import empty_record, whole, write

from raystow.storage.clock import SYSTEM
from raystow.storage.committer import Committer
from raystow.storage.errors import Damaged, NotFound, SaveFailed, StateError
from raystow.storage.format import keys
from raystow.storage.format.root import Root
from raystow.storage.leases import SECONDS, Lease
from raystow.storage.repository import Repository
from raystow.storage.retention.collect import GRACE, Kind
from raystow.storage.retention.policy import Policy
from raystow.storage.stores.memory import MemoryStore
from raystow.storage.version import Version


class World:
    """A repository, its store and the one clock of both."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.clock.time = 1e9
        self.clock.tokens = int(SYSTEM.token()[:8], 16)
        self.store = MemoryStore("collect", clock=self.clock)
        self.repository = Repository(self.store, "test", clock=self.clock)
        self.repository.register.create(Root(repository="test"))
        self.committer = Committer(self.repository, "me")

    def commit(self, number: int = 1) -> list[Version]:
        return [write(self.committer, {"w": whole(np.arange(5.0) + i)}) for i in range(number)]

    def drop(self, keep: int = 1) -> None:
        self.repository.plan_retention(Policy(keep_last=keep)).execute()

    def left(self) -> set[str]:
        return {info.key for info in self.store.list("")}

    def live(self) -> set[str]:
        folders = tuple(keys.prefix(version.id, version.attempt) for version in self.repository.versions())
        return {keys.ROOT} | {key for key in self.left() if key.startswith(folders)}


@pytest.fixture
def world() -> World:
    return World()


def leftover(world: World, id: int | None = None) -> tuple[int, str]:
    reserved, attempt = world.committer.reserve()
    id = reserved if id is None else id
    world.store.put(keys.pack(id, attempt, 0, "weights", 0), [b"x" * 100])
    return id, attempt


def test_nothing_is_garbage_in_a_repository_of_versions(world):
    world.commit(3)
    world.clock.time += 2 * GRACE
    plan = world.repository.plan_collection()
    assert (plan.garbage, plan.scraps, plan.unfinished) == ((), (), ())


@pytest.mark.parametrize("grace", [-1.0, float("nan"), float("inf")])
def test_a_grace_period_that_makes_no_sense_is_refused(world, grace):
    with pytest.raises(StateError, match="grace is"):
        world.repository.plan_collection(grace=grace)


def test_dropped_versions_go_after_the_grace_period_and_are_forgotten(world):
    world.commit(3)
    world.drop()
    assert [d.id for d in world.repository.root().dropped] == [1, 2]
    world.clock.time += GRACE - 1
    plan = world.repository.plan_collection()
    assert plan.due == ()
    assert "grace period ends in" in plan.explain()[0]
    world.clock.time += 2
    done = world.repository.plan_collection().execute()
    assert (done.attempts, done.objects) == (2, 6)
    assert world.repository.root().dropped == ()
    assert world.left() == world.live()
    world.repository.verify(world.repository.versions()[0])


def test_what_is_looked_at_after_each_commit_is_the_dropped(world):
    world.commit(3)
    world.drop()
    leftover(world)
    world.clock.time += 2 * GRACE
    plan = world.repository.plan_collection(dropped_only=True)
    assert [g.kind for g in plan.due] == [Kind.DROPPED, Kind.DROPPED]
    plan.execute()
    assert world.left() != world.live()
    world.repository.plan_collection().execute()
    assert world.left() == world.live()


def test_a_failed_attempt_whose_id_is_passed_goes(world):
    leftover(world)
    world.commit()
    world.clock.time += GRACE
    (garbage,) = world.repository.plan_collection().due
    assert (garbage.kind, garbage.objects, garbage.nbytes) == (Kind.FAILED, 1, 100)
    world.repository.plan_collection().execute()
    assert world.left() == world.live()


def test_an_attempt_in_flight_protects_older_leftovers_of_ids_not_passed(world):
    leftover(world)
    world.clock.time += GRACE
    leftover(world)
    plan = world.repository.plan_collection()
    assert plan.due == ()
    assert [g.kept.split(":")[0] for g in plan.garbage] == ["a save may be in flight", "the grace period ends in 3600 s"]


def test_a_writer_that_slept_through_the_collection_of_its_attempt_cannot_commit_it(world):
    record = empty_record(world.committer)
    world.store.put(keys.pack(record.id, record.attempt, 0, "weights", 0), [b"x"])
    world.clock.time += GRACE
    world.repository.plan_collection().execute()
    assert world.left() == world.live()
    with pytest.raises(SaveFailed, match="is spent"):
        world.committer.commit(record)
    (version,) = world.commit()  # the next save works
    world.repository.verify(version)


def test_what_was_committed_since_the_plan_stays(world):
    record = empty_record(world.committer)
    world.store.put(keys.record(record.id, record.attempt), [record.dump()])
    world.clock.time += GRACE
    plan = world.repository.plan_collection()
    assert len(plan.due) == 1
    world.committer.commit(record)
    plan.execute()
    assert [version.record for version in world.repository.versions()] == [record]


def test_a_lease_keeps_a_dropped_version_until_it_ends(world):
    old, _ = world.commit(2)
    lease = Lease(world.store, old.id, old.attempt, world.clock)
    lease.renew()
    assert world.repository.plan_retention(Policy(keep_last=1)).dropped == ()
    lease.release()
    world.drop()
    lease.renew()  # written before the drop, renewed after it
    world.clock.time += SECONDS - 1
    plan = world.repository.plan_collection(grace=0)
    assert [g.kept for g in plan.garbage] == ["it is being read under a lease"]
    world.repository.verify(old)
    world.clock.time += 1
    done = world.repository.plan_collection(grace=0).execute()
    assert (done.attempts, done.scraps) == (1, 1)
    assert world.left() == world.live()


def test_a_lease_taken_after_the_plan_counts(world):
    old, _ = world.commit(2)
    world.drop()
    plan = world.repository.plan_collection(grace=0)
    Lease(world.store, old.id, old.attempt, world.clock).renew()
    plan.execute()
    world.repository.verify(old)
    assert len(world.repository.root().dropped) == 1


def test_a_version_that_is_gone_is_not_leased(world):
    old, _ = world.commit(2)
    world.drop()
    with pytest.raises(NotFound, match="was dropped"), world.repository.lease(old):
        raise AssertionError
    assert not list(world.store.list(keys.LEASES))


def test_the_newest_verified_version_is_kept(world):
    versions = world.commit(4)
    for version in (versions[1], versions[0]):
        world.repository.record_verified(version)
    decisions = world.repository.plan_retention(Policy(keep_last=1)).decisions
    assert [(d.entry.id, d.rules) for d in decisions if d.keep] == [(2, ("newest verified",)), (4, ("newest", "last 1"))]


def test_a_noted_version_that_is_damaged_gives_way_to_the_newest_whole_one(world):
    one, two, three, four = world.commit(4)
    assert world.repository.record_verified(one, two, three, four) == 4
    assert world.repository.record_verified(one, damaged=[two]) == 4  # another one is damaged: the note stays
    assert world.repository.record_verified(one, two, three, damaged=[four]) == world.repository.root().verified == 3
    world.drop()
    assert [version.id for version in world.repository.versions()] == [3, 4]
    assert world.repository.record_verified(two, damaged=[three]) == 0  # what was dropped is not noted


def test_a_noted_version_goes_with_what_it_is_a_difference_to(world):
    states = [np.arange(5_000) + step for step in range(3)]
    one, two = (write(world.committer, {"w": whole(state)}) for state in states[:2])
    three = write(world.committer, {"w": whole(states[2])}, base=(1, {"w": states[0]}))
    assert world.repository.record_verified(three) == 3
    assert world.repository.record_verified(damaged=[two]) == 3
    assert world.repository.record_verified(two, damaged=[one]) == 2


def test_a_note_that_has_moved_meanwhile_is_not_taken_back(world, monkeypatch):
    one, two, three = world.commit(3)
    world.repository.record_verified(two)
    put_if = world.store.put_if

    def beaten(*args):
        monkeypatch.setattr(world.store, "put_if", put_if)
        assert world.repository.record_verified(three) == 3
        return put_if(*args)

    monkeypatch.setattr(world.store, "put_if", beaten)
    assert world.repository.record_verified(one, damaged=[two]) == 3


def test_a_version_that_was_written_anew_is_not_the_one_found_damaged(world):
    one, two, _ = world.commit(3)
    anew = replace(two.entry, attempt="f" * 16)
    world.repository.register.update(
        lambda root: replace(root, versions=(root.versions[0], anew, root.versions[2]), verified=anew.id)
    )
    assert world.repository.record_verified(one, damaged=[two]) == 2


def test_a_collection_that_died_is_run_again(world):
    world.commit(3)
    world.drop()
    deleted: list[int] = []

    def die(objects: int) -> None:
        deleted.append(objects)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        world.repository.plan_collection(grace=0).execute(die)
    assert deleted == [1]  # the record first: what is left looks like no version
    for info in world.store.list("versions/00000002"):
        world.store.delete([info.key])
    world.repository.plan_collection(grace=0).execute()
    assert world.left() == world.live()
    assert world.repository.root().dropped == ()


def test_scraps_go(world):
    world.store.put("probe/0123456789abcdef", [b"left over"])
    world.store.put("somebody/elses.txt", [b"not ours"])
    world.clock.time += GRACE
    assert world.repository.plan_collection().execute().scraps == 1
    assert world.left() == {keys.ROOT, "somebody/elses.txt"}


def test_without_a_root_nothing_is_collected(world):
    leftover(world)
    tagged = world.store.get_tagged(keys.ROOT, max_bytes=1 << 20)
    world.store.put_if(keys.ROOT, tagged.data[:-9], tagged.tag)
    with pytest.raises(Damaged, match=r"root\.json"):
        world.repository.plan_collection(grace=0)
    assert len(world.left()) == 2


def test_a_zombie_with_the_epoch_of_a_repaired_root_is_fenced(world):
    root = world.repository.root()
    world.repository.register.update(lambda root: replace(root, owner="someone else"))
    assert world.repository.root().epoch == root.epoch
    with pytest.raises(Exception, match="someone else"):
        world.commit()
