"""Repair: the versions that it restores, the versions that it leaves out, and that it never replaces intact objects."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from helpers.builders import empty_record, memory_repository, whole, write
from helpers.fake_clock import FakeClock
from helpers.packs import flip
from helpers.scripted_store import script

from raystow.storage.checks.repair import RepairPlan, State, plan_repair
from raystow.storage.coding.digest import stored_digest
from raystow.storage.commit.committer import Committer
from raystow.storage.commit.leases import Lease
from raystow.storage.errors import (
    Damaged,
    Fenced,
    NotARepository,
    PreconditionFailed,
    StoreUnavailable,
    Unsupported,
    Untrusted,
)
from raystow.storage.format import keys, records
from raystow.storage.format.root import Dropped, Rewrite, RolledBack, Root, Segment
from raystow.storage.format.signature import Signer, Trust
from raystow.storage.format.version_record import FragmentInfo
from raystow.storage.limits import MAX_FRAGMENT, MAX_INTEGER
from raystow.storage.repository import Repository, create_repository, open_repository
from raystow.storage.retention.policy import Policy
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores.memory import MemoryStore
from raystow.storage.versions.version import Version


def commit(repository: Repository, number: int = 1) -> list[Version]:
    committer = Committer(repository, f"owner-{SYSTEM.token()}")
    return [write(committer, {"w": whole(np.arange(5.0) + i)}) for i in range(number)]


def lose(repository: Repository, *names: str) -> None:
    repository.store.delete(names or [keys.ROOT])


def plan(repository: Repository) -> RepairPlan:
    return plan_repair(repository.store)


def left_out(repair: RepairPlan) -> dict[int, str]:
    return {f.id: f.lacks for f in repair.found if f.lacks}


def test_an_intact_repository_needs_no_repair(repository: Repository) -> None:
    commit(repository)
    before = repository.root()
    repair = plan(repository)
    assert not repair.needed
    assert repair.execute() == ()
    assert repository.root() == before


ATTEMPT = "0123456789abcdef"


def with_entry(root: Root, **changes: object) -> Root:
    return replace(root, versions=(replace(root.versions[0], **changes), *root.versions[1:]))


@pytest.mark.parametrize(
    "change",
    [
        lambda root: replace(root, dropped=(Dropped(0, ATTEMPT, 1.0),)),
        lambda root: replace(root, dropped=(Dropped(1, "../../other", 1.0),)),
        lambda root: replace(root, dropped=(Dropped(root.next_id, ATTEMPT, 1.0),)),
        lambda root: replace(root, dropped=(Dropped(MAX_INTEGER, ATTEMPT, 1.0),)),
        lambda root: replace(root, rewrites=(Rewrite(0, ATTEMPT, 1.0),)),
        lambda root: replace(root, rewrites=(Rewrite(1, "no attempt", 1.0),)),
        lambda root: replace(root, rewrites=(Rewrite(root.next_id, ATTEMPT, 1.0),)),
        lambda root: with_entry(root, id=0),
        lambda root: with_entry(root, attempt="no attempt"),
        lambda root: replace(root, next_id=2),
        lambda root: replace(root, rolled_back=(RolledBack(replace(root.versions[0], attempt="x"), 0, 1.0),)),
        lambda root: replace(root, next_segment=2, segments=(Segment(1, "x", "", 1, 9, "", 1.0, 1),)),
        lambda root: replace(root, next_segment=2, segments=(Segment(2, ATTEMPT, "", 1, 9, "", 1.0, 1),)),
    ],
)
def test_a_root_with_impossible_attempts_is_repaired(repository: Repository, change: Callable[[Root], Root]) -> None:
    """Otherwise no collection would ever end: the attempt has no objects, or ids would be spent up to it."""
    versions = [version.id for version in commit(repository, 3)]
    repository.store.put(keys.ROOT, [change(repository.root()).dump()])
    with pytest.raises(Damaged, match="there is no"):
        repository.root()
    assert plan(repository).root.state is State.DAMAGED
    plan(repository).execute()
    assert [version.id for version in repository.versions()] == versions
    repository.plan_collection(grace=0).execute()
    assert not plan(repository).needed


@pytest.mark.parametrize("key", ["versions/{}-{}/version.json", "segments/{}-{}/segment.json", "leases/{}-{}-{}.json"])
@pytest.mark.parametrize("id", [MAX_INTEGER, 10**19 - 1])
def test_an_object_with_a_number_out_of_range_spends_no_id(repository: Repository, key: str, id: int) -> None:
    """A root whose next id is no integer would be lost."""
    (version,) = commit(repository)
    repository.store.put(key.format(id, ATTEMPT, ATTEMPT), [b"x"])
    repository.plan_collection(grace=0).execute()
    assert repository.latest() == version
    lose(repository)
    plan(repository).execute()
    assert repository.latest() == version


@pytest.mark.parametrize("damage", [lose, flip])
def test_repair_restores_all_versions_unchanged(repository: Repository, damage: object) -> None:
    versions = commit(repository, 3)
    old = repository.root()
    damage(repository, keys.ROOT)  # type: ignore[operator]
    with pytest.raises(Damaged, match="raystow repair"):
        repository.versions()
    repair = plan(repository)
    assert repair.root.state is (State.MISSING if damage is lose else State.DAMAGED)
    with pytest.raises(Damaged):
        repository.versions()  # the plan alone writes nothing
    assert repair.execute() == (keys.ROOT,)
    assert repository.versions() == versions
    for version in versions:
        repository.verify(version)
    root = repository.root()
    assert (root.epoch, root.next_id) == (old.epoch + 1, old.next_id)
    assert root.owner.startswith("repair-")
    assert not plan(repository).needed


@pytest.mark.s3
@pytest.mark.parametrize("damage", [lose, flip])
def test_a_damaged_root_on_s3_is_replaced_by_its_tag(s3_uri: str, damage: object) -> None:
    repository = create_repository(s3_uri)
    versions = commit(repository, 2)
    damage(repository, keys.ROOT)  # type: ignore[operator]
    repair = plan(repository)
    assert repair.execute() == (keys.ROOT,)
    assert repository.versions() == versions
    with pytest.raises(PreconditionFailed):
        repair.execute()


def test_an_earlier_coordinator_is_fenced_after_repair(repository: Repository) -> None:
    commit(repository)
    before = Committer(repository, "before")  # no record has its epoch, so the new root gets the same epoch
    pending = empty_record(before)
    lose(repository)
    plan(repository).execute()
    assert repository.root().epoch == before.epoch
    with pytest.raises(Fenced, match="repair-"):
        before.commit(pending)
    after = Committer(repository, "after")
    assert after.epoch == before.epoch + 1
    assert write(after, {"w": whole(np.zeros(3))}) == repository.latest()


@pytest.mark.parametrize(
    ("name", "says"),
    [("version.json", "no version record"), ("tensors-00000.parquet", "is missing"), ("weights-00000-00000.pack", "is missing")],
)
def test_a_version_without_one_of_its_objects_is_left_out(repository: Repository, name: str, says: str) -> None:
    first, second = commit(repository, 2)
    lose(repository, keys.ROOT, keys.prefix(second.id, second.attempt) + name)
    repair = plan(repository)
    assert says in left_out(repair)[2]
    repair.execute()
    assert repository.versions() == [first]
    assert repository.root().next_id == 3


@pytest.mark.parametrize(
    ("name", "says"), [("version.json", "its own digest"), ("tensors-00000.parquet", "does not match its digest")]
)
def test_a_version_with_a_flipped_bit_is_left_out(repository: Repository, name: str, says: str) -> None:
    _, second = commit(repository, 2)
    flip(repository, keys.prefix(second.id, second.attempt) + name)
    lose(repository)
    assert says in left_out(plan(repository))[2]


def test_a_version_with_a_truncated_pack_is_left_out(repository: Repository) -> None:
    (version,) = commit(repository)
    repository.store.put(keys.pack(version.id, version.attempt, 0, "weights", 0), [b"x"])
    lose(repository)
    assert "has 1 bytes instead of" in left_out(plan(repository))[1]


def test_a_fragment_above_the_limit_is_not_read(tmp_path: Path) -> None:
    repository = create_repository(str(tmp_path))
    committer = Committer(repository, "owner")
    info = FragmentInfo(0, MAX_FRAGMENT + 1, "ab" * 32, (0,), 0, 0, 0)
    version = committer.commit(replace(empty_record(committer), fragments=(info,)))
    fragment = tmp_path / keys.fragment(version.id, version.attempt, 0)
    fragment.touch()
    os.truncate(fragment, info.size)  # takes no space
    lose(repository)
    assert f"at most {MAX_FRAGMENT} are possible" in left_out(plan(repository))[1]


def test_a_record_in_the_wrong_folder_is_left_out(repository: Repository) -> None:
    (version,) = commit(repository)
    data = repository.store.get(keys.record(version.id, version.attempt), max_bytes=1 << 20)
    repository.store.put(keys.record(7, "f" * 16), [data])
    lose(repository)
    assert "another attempt" in left_out(plan(repository))[7]


def test_of_two_attempts_of_one_id_the_higher_epoch_is_used(repository: Repository) -> None:
    commit(repository)
    late = empty_record(Committer(repository, "late"))
    winner = empty_record(Committer(repository, "winner"))
    assert late.id == winner.id == 2
    for record in (winner, late):
        repository.store.put(record.key(), [record.dump()])
    lose(repository)
    repair = plan(repository)
    assert left_out(repair) == {2: f"the id belongs to attempt {winner.attempt} of epoch {winner.epoch}"}
    repair.execute()
    assert [(version.id, version.attempt) for version in repository.versions()][1:] == [(2, winner.attempt)]


def test_a_delta_is_restored_only_with_its_base(repository: Repository) -> None:
    committer, arrays = Committer(repository, "me"), [np.arange(20_000) + i for i in range(4)]
    versions = [
        write(committer, {"w": whole(array)}, base=base and (base, {"w": arrays[base - 1]}))
        for array, base in zip(arrays, (None, 1, None, 2), strict=True)
    ]
    lose(repository)
    assert [entry.bases for entry in plan(repository).new_root.versions] == [(), (1,), (), (2,)]
    lose(repository, keys.pack(1, versions[0].attempt, 0, "weights", 0))
    repair = plan(repository)
    assert left_out(repair).keys() == {1, 2, 4}
    assert "version 2, which does not come back" in left_out(repair)[4]
    repair.execute()
    assert np.array_equal(repository.latest().read("w"), arrays[2])


def test_repair_never_reuses_an_id_found_in_the_store(repository: Repository) -> None:
    commit(repository)
    repository.store.put(keys.pack(9, "a" * 16, 0, "weights", 0), [b"left over"])
    lose(repository)
    plan(repository).execute()
    assert repository.root().next_id == 10
    Lease(repository.store, 11, "b" * 16, SYSTEM).renew()
    lose(repository)
    plan(repository).execute()
    assert Committer(repository, "next").reserve()[0] == 12


def test_repair_recovers_dropped_versions_but_no_pins(repository: Repository) -> None:
    """It also recovers versions that were not committed."""
    first, second, third = commit(repository, 3)
    repository.pin(third, "good")
    repository.plan_retention(Policy(keep_last=1)).execute()
    uncommitted = empty_record(Committer(repository, "dies"))
    repository.store.put(uncommitted.key(), [uncommitted.dump()])
    assert repository.versions() == [third]
    lose(repository)
    repair = plan(repository)
    assert {"pins", "committed", "dropped", "coordinator"} <= set(" ".join(repair.notes).replace(",", "").split())
    repair.execute()
    assert [version.id for version in repository.versions()] == [1, 2, 3, 4]
    assert repository.versions()[:2] == [first, second]
    assert repository.root().pins == {}


@pytest.mark.parametrize("damage", [lose, flip])
def test_the_marker_is_restored_from_the_root(repository: Repository, damage: object) -> None:
    commit(repository)
    before = repository.root()
    damage(repository, keys.MARKER)  # type: ignore[operator]
    with pytest.raises(Damaged, match="raystow repair"):
        open_repository(repository.uri)
    assert plan(repository).execute() == (keys.MARKER,)
    again = open_repository(repository.uri)
    assert again.id == repository.id
    assert again.root() == before


def test_root_and_marker_are_restored_from_the_records(repository: Repository) -> None:
    versions = commit(repository, 2)
    lose(repository, keys.ROOT, keys.MARKER)
    for open in (open_repository, create_repository):  # neither function may treat the repository as an empty place
        with pytest.raises(Damaged, match="raystow repair"):
            open(repository.uri)
    assert plan(repository).execute() == (keys.ROOT, keys.MARKER)
    assert open_repository(repository.uri).versions() == versions


def test_an_interrupted_repair_is_completed_by_the_next_one(repository: Repository) -> None:
    versions = commit(repository)
    lose(repository, keys.ROOT, keys.MARKER)
    plan(repository).execute()
    lose(repository, keys.MARKER)
    assert plan(repository).execute() == (keys.MARKER,)
    assert open_repository(repository.uri).versions() == versions


def test_objects_of_two_repositories_are_refused(repository: Repository) -> None:
    other = memory_repository()
    commit(repository)
    (foreign,) = commit(other)
    key = keys.record(foreign.id, foreign.attempt)
    repository.store.put(key, [other.store.get(key, max_bytes=1 << 20)])
    lose(repository)
    with pytest.raises(Damaged) as caught:
        plan(repository)
    assert repository.id in str(caught.value)
    assert other.id in str(caught.value)
    with pytest.raises(Damaged):
        repository.root()


def test_a_marker_of_another_repository_is_refused(repository: Repository) -> None:
    commit(repository)
    marker = records.dump({"repository": "other", "created": 0.0}, keys.MARKER)
    repository.store.put(keys.MARKER, [marker])
    with pytest.raises(Damaged, match="objects of 2 repositories"):
        plan(repository)


def test_repair_without_any_repository_id_fails(repository: Repository) -> None:
    with pytest.raises(NotARepository):
        plan_repair(MemoryStore("empty"))
    lose(repository)
    flip(repository, keys.MARKER)
    with pytest.raises(Damaged, match="nothing tells"):
        plan(repository)


def test_an_empty_repository_gets_an_empty_root(repository: Repository) -> None:
    flip(repository, keys.ROOT)
    plan(repository).execute()
    assert (repository.versions(), repository.root().next_id) == ([], 1)


@pytest.mark.parametrize("damage", [lose, flip])
def test_a_root_written_after_the_plan_is_not_replaced(repository: Repository, damage: object) -> None:
    commit(repository)
    healthy = repository.store.get(keys.ROOT, max_bytes=1 << 20)
    damage(repository, keys.ROOT)  # type: ignore[operator]
    repair = plan(repository)
    repository.store.put(keys.ROOT, [healthy])
    with pytest.raises(PreconditionFailed, match="left alone"):
        repair.execute()
    assert repository.store.get(keys.ROOT, max_bytes=1 << 20) == healthy


def test_a_root_written_before_the_swap_is_not_replaced(repository: Repository) -> None:
    commit(repository)
    healthy = repository.store.get(keys.ROOT, max_bytes=1 << 20)
    lose(repository)
    repair = plan(repository)
    store, put_if = repository.store, repository.store.put_if

    def late(key: str, data: bytes, tag: str | None) -> str:
        store.put(key, [healthy])
        return put_if(key, data, tag)

    script(store, put_if=late)
    with pytest.raises(PreconditionFailed):
        repair.execute()
    assert store.get(keys.ROOT, max_bytes=1 << 20) == healthy


def test_a_root_damaged_only_in_transit_is_not_replaced(repository: Repository) -> None:
    commit(repository)
    before, get_tagged = repository.root(), repository.store.get_tagged
    reads = itertools.count()

    def noisy(key: str, *, max_bytes: int) -> object:
        tagged = get_tagged(key, max_bytes=max_bytes)
        return replace(tagged, data=tagged.data[:-9]) if next(reads) == 0 else tagged

    script(repository.store, get_tagged=noisy)
    repair = plan(repository)
    assert repair.needed
    with pytest.raises(PreconditionFailed):
        repair.execute()
    assert repository.root() == before


@pytest.mark.parametrize("applied", [True, False])
def test_a_put_without_an_answer_is_resolved_by_a_read(repository: Repository, applied: bool) -> None:
    versions = commit(repository)
    lose(repository)
    repair = plan(repository)
    put_if = repository.store.put_if

    def lost(key: str, data: bytes, tag: str | None) -> str:
        if applied:
            put_if(key, data, tag)
        raise StoreUnavailable("no answer", subject=key)

    script(repository.store, put_if=lost)
    if applied:
        repair.execute()
        assert repository.versions() == versions
    else:
        with pytest.raises(StoreUnavailable):
            repair.execute()


def test_records_of_a_newer_format_raise_unsupported(repository: Repository) -> None:
    (version,) = commit(repository)
    key = keys.record(version.id, version.attempt)
    newer = records.dump({"repository": repository.id}, key).partition(b"\n")[2].replace(b'"format":1', b'"format":2')
    repository.store.put(key, [f'{{"digest": "{stored_digest(newer).hex()}",\n'.encode() + newer])
    lose(repository)
    with pytest.raises(Unsupported, match="upgrade"):
        plan(repository)


def test_repair_leaves_out_unsigned_versions_if_required(repository: Repository) -> None:
    signer = Signer(Ed25519PrivateKey.generate())
    trust = Trust((signer.public,))
    signed = write(Committer(repository, "signs", signer), {"w": whole(np.arange(3.0))})
    (unsigned,) = commit(repository)
    lose(repository, keys.ROOT, keys.MARKER)
    repair = plan_repair(repository.store, trust=trust)
    assert "not signed" in left_out(repair)[unsigned.id]
    repair.execute()
    again = open_repository(repository.uri)
    assert (again.signed_by, [version.id for version in again.versions()]) == (trust.keys, [signed.id])
    lose(repository)  # the restored marker requires signatures
    assert list(left_out(plan(repository))) == [unsigned.id]
    with pytest.raises(Untrusted):
        Committer(again, "does not sign")


def test_explain_lists_all_objects_and_versions(repository: Repository) -> None:
    first, second = commit(repository, 2)
    lose(repository, keys.ROOT, keys.record(second.id, second.attempt))
    lines = plan(repository).explain()
    assert lines[:2] == ["root.json: missing", "raystow.json: whole"]
    assert lines[2] == f"version 1 (attempt {first.attempt}, step 0, epoch 1): comes back"
    assert lines[3].startswith(f"version 2 (attempt {second.attempt}): left out: no version record")


def test_a_store_outage_is_not_reported_as_damage(repository: Repository) -> None:
    def silent(*_: object, **__: object) -> object:
        raise StoreUnavailable("time-out")

    commit(repository)
    lose(repository)
    script(repository.store, get=silent)
    with pytest.raises(StoreUnavailable):
        plan(repository)


def test_repair_uses_the_clock_that_it_is_given() -> None:
    clock = FakeClock()
    clock.time = 5.0
    repository = memory_repository(clock)
    commit(repository)
    lose(repository, keys.MARKER)
    plan_repair(repository.store, clock).execute()
    assert records.load(repository.store.get(keys.MARKER, max_bytes=1 << 10), keys.MARKER)["created"] == 5.0
