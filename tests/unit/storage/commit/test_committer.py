from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from helpers.builders import empty_record, memory_repository, overwrite_root, whole, write
from helpers.fake_clock import FakeClock
from helpers.scripted_store import script, unscript

from raystow.storage.commit import committer as committer_module
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Fenced, InvariantError, OutcomeUnknown, SaveFailed, StateError, StoreUnavailable
from raystow.storage.format import keys
from raystow.storage.object_store import ObjectInfo
from raystow.storage.repository import Repository
from raystow.storage.retention.policy import Policy


def objects(repository: Repository) -> list[ObjectInfo]:
    return list(repository.store.list(keys.VERSIONS))


def test_each_committer_gets_the_next_epoch(repository):
    assert [Committer(repository, f"owner-{i}").epoch for i in range(3)] == [1, 2, 3]
    assert repository.root().owner == "owner-2"


def test_a_repeated_claim_of_an_owner_keeps_its_epoch(repository):
    assert Committer(repository, "me").epoch == Committer(repository, "me").epoch == 1


def test_ids_ascend_and_attempts_differ(repository):
    committer = Committer(repository, "me")
    reserved = [committer.reserve() for _ in range(5)]
    assert [id for id, _ in reserved] == [1, 2, 3, 4, 5]
    assert len({attempt for _, attempt in reserved}) == 5


def test_an_id_reserved_during_a_commit_is_used_once(repository, monkeypatch):
    committer, ids = Committer(repository, "me"), []
    record = empty_record(committer)
    reserving = threading.Thread(target=lambda: ids.append(committer.reserve()[0]))

    def interrupted(*numbers):
        """The thread of the commit is interrupted between the read and the write of the next id."""
        if reserving.ident is None:
            reserving.start()
            reserving.join(timeout=0.5)
        return max(*numbers)

    monkeypatch.setattr(committer_module, "max", interrupted, raising=False)
    committer.commit(record)
    reserving.join()
    assert [*ids, committer.reserve()[0]] == [2, 3]


def test_a_commit_makes_a_version(repository):
    committer = Committer(repository, "me")
    record = empty_record(committer, step=7)
    version = committer.commit(record)
    assert repository.latest() == version
    assert (version.id, version.step, version.record) == (1, 7, record)
    assert repository.root().next_id == 2


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"step": True},
        {"created": 1e300},
        {"world_size": 1 << 63},
        {"writer": None},
        {"metrics": {"loss": {"a": 1, "b": 2}}, "coding": 5},
        {"created": float("nan")},
    ],
)
def test_a_record_that_a_reader_refuses_is_not_written(repository, change):
    committer = Committer(repository, "me")
    before = repository.store.get(keys.ROOT, max_bytes=1 << 20)
    with pytest.raises((SaveFailed, StateError)):
        committer.commit(replace(empty_record(committer), **change))
    assert (objects(repository), repository.store.get(keys.ROOT, max_bytes=1 << 20)) == ([], before)


@pytest.mark.parametrize("change", [{"pins": {"a": True}}, {"epoch": 1 << 63}, {"owner": 5}, {"verified": -1}])
def test_a_root_that_a_reader_refuses_is_not_written(repository, change):
    before = repository.store.get(keys.ROOT, max_bytes=1 << 20)
    with pytest.raises(InvariantError, match="readers would refuse"):
        overwrite_root(repository, lambda root: replace(root, **change))
    assert repository.store.get(keys.ROOT, max_bytes=1 << 20) == before


@pytest.mark.parametrize("number", ["epoch", "next_id", "next_segment", "rollbacks"])
def test_a_root_that_was_read_before_a_swap_is_ignored(committer, number):
    before = committer.root
    after = replace(before, **{number: getattr(before, number) + 1})
    assert committer.notice(after) == committer.root == after
    assert committer.notice(before) == committer.root == after


def test_swaps_by_others_are_noticed(committer):
    repository = committer.catalog
    version, _ = (committer.commit(empty_record(committer, step)) for step in range(2))
    repository.pin(version, "best")
    assert committer.notice(repository.root()).pins == {"best": version.id}
    repository.unpin("best")
    assert committer.notice(repository.root()).pins == {}
    repository.plan_retention(Policy(keep_last=1)).execute()
    assert [entry.id for entry in committer.notice(repository.root()).versions] == [2]
    Committer(repository, "other")
    assert committer.notice(repository.root()).owner == committer.root.owner == "other"


def test_a_takeover_takes_a_repaired_root_with_lower_numbers(repository):
    committer = Committer(repository, "me")
    committer.notice(replace(repository.root(), rollbacks=1, epoch=7))
    tagged = repository.store.get_tagged(keys.ROOT, max_bytes=1 << 20)
    repaired = replace(repository.root(), owner="repair", write_id="x")
    repository.store.put_if(keys.ROOT, repaired.dump(), tagged.tag)
    committer.take_over("me again")
    assert committer.root == repository.root()


def test_a_repeated_commit_changes_nothing(repository):
    committer = Committer(repository, "me")
    record = empty_record(committer)
    first = committer.commit(record)
    root = repository.root()
    assert committer.commit(record) == first
    assert repository.root() == root


def test_an_older_epoch_cannot_commit(repository):
    old = Committer(repository, "old")
    pending = empty_record(old)
    new = Committer(repository, "new")
    with pytest.raises(Fenced, match=r"root\.json.*epoch 2 of 'new' has replaced epoch 1"):
        old.commit(pending)
    assert repository.versions() == []
    version = new.commit(empty_record(new))
    with pytest.raises(Fenced):
        old.commit(pending)
    assert repository.versions() == [version]


def test_an_older_epoch_finds_its_earlier_commit(repository):
    old = Committer(repository, "old")
    record = empty_record(old)
    version = old.commit(record)
    Committer(repository, "new")
    assert old.commit(record) == version


def test_a_new_epoch_continues_after_the_newest_id(repository):
    old = Committer(repository, "old")
    old.commit(empty_record(old))
    assert Committer(repository, "new").reserve()[0] == 2


def test_an_attempt_older_than_the_newest_version_fails(repository):
    committer = Committer(repository, "me")
    late, early = empty_record(committer), empty_record(committer)
    committer.commit(early)
    with pytest.raises(SaveFailed, match="is spent"):
        committer.commit(late)
    assert [version.id for version in repository.versions()] == [2]


def test_discard_removes_the_objects_of_an_attempt(repository):
    committer = Committer(repository, "me")
    id, attempt = committer.reserve()
    repository.store.put(keys.pack(id, attempt, 0, "weights", 0), [b"left over"])
    other = committer.commit(empty_record(committer))
    committer.discard(id, attempt)
    assert [info.key for info in objects(repository)] == [keys.record(other.id, other.attempt)]


def test_discard_does_not_change_a_live_version(repository):
    import numpy as np

    committer = Committer(repository, "me")
    version = write(committer, {"w": whole(np.arange(5.0))})
    before = objects(repository)
    committer.discard(version.id, version.attempt)
    assert objects(repository) == before
    repository.verify(version)


@pytest.mark.parametrize("applied", [True, False])
def test_an_unknown_outcome_is_resolved_by_a_second_commit(applied):
    class MinuteClock(FakeClock):
        """A clock that advances by a minute with each call."""

        def monotonic(self) -> float:
            self.time += 60
            return self.time

    repository = memory_repository(MinuteClock())
    committer = Committer(repository, "me")
    record = empty_record(committer)
    store, put_if = repository.store, repository.store.put_if

    def lost(key, data, tag):
        if applied:
            put_if(key, data, tag)
        raise StoreUnavailable("no answer", subject=key)

    script(store, put_if=lost)
    with pytest.raises(OutcomeUnknown, match=r"root\.json"):
        committer.commit(record)
    unscript(store)
    assert len(repository.versions()) == applied
    version = committer.commit(record)
    assert repository.versions() == [version]


def test_the_root_of_another_repository_is_damage(repository):
    from raystow.storage.errors import Damaged

    other = memory_repository()
    tagged = repository.store.get_tagged(keys.ROOT, max_bytes=1 << 20)
    repository.store.put_if(keys.ROOT, replace(other.root(), write_id="x").dump(), tagged.tag)
    with pytest.raises(Damaged, match=r"root\.json"):
        repository.versions()
