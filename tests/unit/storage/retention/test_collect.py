"""Collection: the objects that it deletes, the objects that it keeps, and the protection of slow readers and writers."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from helpers.builders import empty_record, overwrite_root, whole, write
from helpers.fake_clock import FakeClock
from helpers.scripted_store import ScriptedStore, script, unscript

from raystow.storage.commit.committer import Committer
from raystow.storage.commit.leases import SECONDS, Lease
from raystow.storage.errors import Damaged, Fenced, NotFound, SaveFailed, StateError
from raystow.storage.format import keys
from raystow.storage.format.root import Dropped, Root
from raystow.storage.repository import Repository
from raystow.storage.retention.collect import GRACE, GarbageKind
from raystow.storage.retention.policy import Policy
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores.memory import MemoryStore
from raystow.storage.versions.version import Version


class CollectedRun:
    """A repository, its store, and the clock that both use."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.clock.time = 1e9
        self.clock.tokens = int(SYSTEM.token()[:8], 16)
        self.store = ScriptedStore("collect", clock=self.clock)
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
def run() -> CollectedRun:
    return CollectedRun()


def leftover(run: CollectedRun, id: int | None = None) -> tuple[int, str]:
    """Store one pack of an attempt that is not committed. Return the id and the attempt."""
    reserved, attempt = run.committer.reserve()
    id = reserved if id is None else id
    run.store.put(keys.pack(id, attempt, 0, "weights", 0), [b"x" * 100])
    return id, attempt


def test_committed_versions_are_not_garbage(run):
    run.commit(3)
    run.clock.time += 2 * GRACE
    plan = run.repository.plan_collection()
    assert (plan.garbage, plan.scraps, plan.unfinished) == ((), (), ())


@pytest.mark.parametrize("grace", [-1.0, float("nan"), float("inf"), "1h", None])
def test_an_invalid_grace_period_is_refused(run, grace):
    with pytest.raises(StateError, match="grace is"):
        run.repository.plan_collection(grace=grace)


def test_dropped_versions_are_deleted_after_the_grace_period(run):
    run.commit(3)
    run.drop()
    assert [d.id for d in run.repository.root().dropped] == [1, 2]
    run.clock.time += GRACE - 1
    plan = run.repository.plan_collection()
    assert plan.due == ()
    assert "grace period ends in" in plan.explain()[0]
    run.clock.time += 2
    done = run.repository.plan_collection().execute()
    assert (done.attempts, done.objects) == (2, 6)
    assert run.repository.root().dropped == ()
    assert run.left() == run.live()
    run.repository.verify(run.repository.versions()[0])


def test_dropped_only_collects_dropped_versions_only(run):
    run.commit(3)
    run.drop()
    leftover(run)
    run.clock.time += 2 * GRACE
    plan = run.repository.plan_collection(dropped_only=True)
    assert [g.kind for g in plan.due] == [GarbageKind.DROPPED, GarbageKind.DROPPED]
    plan.execute()
    assert run.left() != run.live()
    run.repository.plan_collection().execute()
    assert run.left() == run.live()


@pytest.mark.parametrize("dropped_only", [False, True])
def test_many_dropped_versions_are_planned_quickly(run, dropped_only):
    """A coordinator plans a collection after each commit. Quadratic time would be half a minute here."""
    count = 10_000
    dropped = tuple(Dropped(id, f"{id:016x}", run.clock.time) for id in range(1, count + 1))
    overwrite_root(run.repository, lambda root: replace(root, dropped=dropped, next_id=count + 1))
    began = SYSTEM.monotonic()
    plan = run.repository.plan_collection(dropped_only=dropped_only)
    assert SYSTEM.monotonic() - began < 5
    assert [g.id for g in plan.garbage] == list(range(1, count + 1))


def test_a_failed_attempt_with_an_older_id_is_collected(run):
    leftover(run)
    run.commit()
    run.clock.time += GRACE
    (garbage,) = run.repository.plan_collection().due
    assert (garbage.kind, garbage.objects, garbage.nbytes) == (GarbageKind.FAILED, 1, 100)
    run.repository.plan_collection().execute()
    assert run.left() == run.live()


def test_an_attempt_in_flight_protects_older_open_ids(run):
    leftover(run)
    run.clock.time += GRACE
    leftover(run)
    plan = run.repository.plan_collection()
    assert plan.due == ()
    assert [g.kept.split(":")[0] for g in plan.garbage] == ["a save may be in flight", "the grace period ends in 3600 s"]


def test_a_collected_attempt_cannot_be_committed(run):
    leftover(run)
    record = empty_record(run.committer)
    run.store.put(keys.pack(record.id, record.attempt, 0, "weights", 0), [b"x"])
    run.clock.time += GRACE
    run.repository.plan_collection().execute()
    assert run.left() == run.live()
    with pytest.raises(SaveFailed, match="is spent"):
        run.committer.commit(record)
    (version,) = run.commit()  # the next save succeeds
    run.repository.verify(version)


def test_a_version_committed_after_the_plan_is_kept(run):
    record = empty_record(run.committer)
    run.store.put(keys.record(record.id, record.attempt), [record.dump()])
    run.clock.time += GRACE
    plan = run.repository.plan_collection()
    assert len(plan.due) == 1
    run.committer.commit(record)
    plan.execute()
    assert [version.record for version in run.repository.versions()] == [record]


def test_a_version_dropped_since_the_plan_is_forgotten(run):
    record = replace(empty_record(run.committer), packs=None)
    run.store.put(keys.pack(record.id, record.attempt, 0, "weights", 0), [b"."])
    plan = run.repository.plan_collection(grace=0)
    assert [one.kind for one in plan.due] == [GarbageKind.OPEN]
    run.committer.commit(record)
    run.commit()
    run.drop()
    assert [one.id for one in run.repository.root().dropped] == [record.id]
    plan.execute()
    assert run.repository.root().dropped == ()
    assert run.left() == run.live()


def test_a_save_begun_since_the_plan_keeps_its_id(run):
    record = replace(empty_record(run.committer), packs=None)
    run.store.put(keys.pack(record.id, "0" * 16, 0, "weights", 0), [b"."])
    run.clock.time += 101
    plan = run.repository.plan_collection(grace=100)
    assert [one.kind for one in plan.due] == [GarbageKind.OPEN]
    run.store.put(keys.pack(record.id, record.attempt, 0, "weights", 0), [b"."])
    assert plan.execute().attempts == 0
    run.committer.commit(record)
    assert run.repository.plan_collection(grace=100).execute().attempts == 1


def test_a_lease_keeps_a_dropped_version_until_it_ends(run):
    old, _ = run.commit(2)
    lease = Lease(run.store, old.id, old.attempt, run.clock)
    lease.renew()
    assert run.repository.plan_retention(Policy(keep_last=1)).dropped == ()
    lease.release()
    run.drop()
    lease.renew()  # the lease was written before the drop and is renewed after it
    run.clock.time += SECONDS - 1
    plan = run.repository.plan_collection(grace=0)
    assert [g.kept for g in plan.garbage] == ["it is being read under a lease"]
    run.repository.verify(old)
    run.clock.time += 1
    done = run.repository.plan_collection(grace=0).execute()
    assert (done.attempts, done.scraps) == (1, 1)
    assert run.left() == run.live()


def test_a_lease_that_ends_during_its_renewal_stays_ended() -> None:
    renewing, released, puts = threading.Event(), threading.Event(), list[str]()

    class Slow(MemoryStore):
        def put(self, key, parts):
            puts.append(key)
            if len(puts) == 2:
                renewing.set()
                assert released.wait(60)
            super().put(key, parts)

    store = Slow("renewed-late")
    with Lease(store, 1, "a" * 16, SYSTEM, renew_after=0.01):
        assert renewing.wait(60)
        renewers = [thread for thread in threading.enumerate() if thread.name == "raystow-lease"]
    released.set()
    for renewer in renewers:
        renewer.join(60)
    assert list(store.list("")) == []


def test_a_lease_created_after_the_plan_protects_its_version(run):
    old, _ = run.commit(2)
    run.drop()
    plan = run.repository.plan_collection(grace=0)
    Lease(run.store, old.id, old.attempt, run.clock).renew()
    plan.execute()
    run.repository.verify(old)
    assert len(run.repository.root().dropped) == 1


def test_leasing_a_dropped_version_raises_not_found(run):
    old, _ = run.commit(2)
    run.drop()
    with pytest.raises(NotFound, match="was dropped"), run.repository.lease(old):
        raise AssertionError
    assert not list(run.store.list(keys.LEASES))


def test_the_newest_verified_version_is_kept(run):
    versions = run.commit(4)
    for version in (versions[1], versions[0]):
        run.repository.record_verified(version)
    decisions = run.repository.plan_retention(Policy(keep_last=1)).decisions
    assert [(d.entry.id, d.rules) for d in decisions if d.keep] == [(2, ("newest verified",)), (4, ("newest", "last 1"))]


def test_a_verified_version_found_damaged_is_replaced(run):
    """The newest intact version becomes the verified version."""
    one, two, three, four = run.commit(4)
    assert run.repository.record_verified(one, two, three, four) == 4
    # another version is damaged: the record of the verified version stays
    assert run.repository.record_verified(one, damaged=[two]) == 4
    assert run.repository.record_verified(one, two, three, damaged=[four]) == run.repository.root().verified == 3
    run.drop()
    assert [version.id for version in run.repository.versions()] == [3, 4]
    assert run.repository.record_verified(two, damaged=[three]) == 0  # a dropped version is not recorded as verified


def test_damage_of_a_base_clears_its_verified_delta(run):
    states = [np.arange(5_000) + step for step in range(3)]
    one, two = (write(run.committer, {"w": whole(state)}) for state in states[:2])
    three = write(run.committer, {"w": whole(states[2])}, base=(1, {"w": states[0]}))
    assert run.repository.record_verified(three) == 3
    assert run.repository.record_verified(damaged=[two]) == 3
    assert run.repository.record_verified(two, damaged=[one]) == 2


def test_a_newer_concurrent_verification_is_kept(run):
    one, two, three = run.commit(3)
    run.repository.record_verified(two)
    put_if = run.store.put_if

    def beaten(*args):
        unscript(run.store)
        assert run.repository.record_verified(three) == 3
        return put_if(*args)

    script(run.store, put_if=beaten)
    assert run.repository.record_verified(one, damaged=[two]) == 3


def test_damage_of_a_replaced_attempt_is_ignored(run):
    one, two, _ = run.commit(3)
    anew = replace(two.entry, attempt="f" * 16)
    overwrite_root(
        run.repository, lambda root: replace(root, versions=(root.versions[0], anew, root.versions[2]), verified=anew.id)
    )
    assert run.repository.record_verified(one, damaged=[two]) == 2


def test_an_interrupted_collection_is_completed_by_the_next(run):
    run.commit(3)
    run.drop()
    deleted: list[int] = []

    def die(objects: int) -> None:
        deleted.append(objects)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.repository.plan_collection(grace=0).execute(die)
    assert deleted == [1]  # the record is deleted first, so the remaining objects are not a version
    for info in run.store.list("versions/00000002"):
        run.store.delete([info.key])
    run.repository.plan_collection(grace=0).execute()
    assert run.left() == run.live()
    assert run.repository.root().dropped == ()


def test_only_stale_probe_objects_are_deleted_as_scraps(run):
    run.store.put("probe/0123456789abcdef", [b"left over"])
    run.clock.time += GRACE
    assert run.repository.plan_collection().execute().scraps == 1
    assert run.left() == {keys.ROOT}


def test_objects_of_other_programs_are_never_deleted(run):
    """Also not in the folder of an attempt that is deleted."""
    id, attempt = leftover(run)
    foreign = {
        "data/train.bin",
        "leases/contract.pdf",
        "probe/results.csv",
        "versions/notes.txt",
        f"{keys.prefix(id, attempt)}notes.txt",
        "nested/root.json",
        f"nested/{keys.pack(id, attempt, 0, 'weights', 0)}",
        f"nested/{keys.lease(id, attempt, attempt)}",
    }
    for key in foreign:
        run.store.put(key, [b"not ours"])
    run.clock.time += 2 * SECONDS
    assert run.repository.plan_collection(grace=0).execute().objects == 1
    assert run.left() == {keys.ROOT, *foreign}
    assert not run.repository.plan_collection(grace=0).garbage


def test_a_discarded_attempt_keeps_objects_of_others(run):
    id, attempt = leftover(run)
    run.store.put(f"{keys.prefix(id, attempt)}notes.txt", [b"not ours"])
    run.committer.discard(id, attempt)
    assert run.left() == {keys.ROOT, f"{keys.prefix(id, attempt)}notes.txt"}


def test_without_a_root_nothing_is_collected(run):
    leftover(run)
    tagged = run.store.get_tagged(keys.ROOT, max_bytes=1 << 20)
    run.store.put_if(keys.ROOT, tagged.data[:-9], tagged.tag)
    with pytest.raises(Damaged, match=r"root\.json"):
        run.repository.plan_collection(grace=0)
    assert len(run.left()) == 2


def test_another_owner_of_the_same_epoch_fences_a_committer(run):
    root = run.repository.root()
    overwrite_root(run.repository, lambda root: replace(root, owner="someone else"))
    assert run.repository.root().epoch == root.epoch
    with pytest.raises(Fenced, match="someone else"):
        run.commit()
