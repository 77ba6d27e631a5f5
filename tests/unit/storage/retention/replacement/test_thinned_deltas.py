"""Thinning of versions that are deltas to each other, and repair after the loss of the root."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from helpers.builders import write
from helpers.delta_versions import WORDS, as_it_was, star
from helpers.fake_clock import FakeClock
from helpers.training_versions import bits, halves, thin, weights

from raystow.orchestrator.restore.agreement import LocalAgreement
from raystow.storage.checks.repair import plan_repair
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Damaged, SaveFailed
from raystow.storage.format import keys
from raystow.storage.repository import Repository
from raystow.storage.retention import replacement
from raystow.storage.retention.policy import Policy

# Deltas


def test_a_thinned_delta_version_stays_a_delta(repository: Repository) -> None:
    arrays = star(Committer(repository, "me"))
    plan = repository.plan_retention(Policy(resumable=1))
    assert [entry.id for entry in plan.thinned] == [3, 2, 1]
    plan.execute()
    for version in repository.versions():
        repository.verify(version)
        assert as_it_was(version, arrays)
    assert [(v.resumable, v.entry.bases) for v in repository.versions()] == [
        (False, ()),
        (False, (1,)),
        (False, (1,)),
        (True, ()),
    ]
    assert repository.version(2).bytes < repository.version(1).bytes / 3
    assert [row.coding.base for row in repository.version(2).chunks["model.step"]] == [1, 1], "encoded again"
    assert not repository.plan_retention(Policy(resumable=1)).thinned


def test_a_base_is_not_thinned_before_its_deltas(repository: Repository) -> None:
    arrays = star(committer := Committer(repository, "me"))
    assert not thin(repository, 1, 1)
    repository.pin(repository.version(2), "good")
    plan = repository.plan_retention(Policy(resumable=1))
    assert [decision.why for decision in plan.decisions] == [
        "no rule drops it, base of version 3 and 1 more",
        "pinned as good",
        "no rule drops it; older than the last 1 resumable",
        "newest",
    ]
    plan.execute()
    assert [version.resumable for version in repository.versions()] == [True, True, False, True]
    repository.unpin("good")
    repository.plan_retention(Policy(resumable=1)).execute()
    assert [version.resumable for version in repository.versions()] == [False, False, False, True]
    assert all(as_it_was(version, arrays) for version in repository.versions())
    with pytest.raises(SaveFailed, match="delta to version 1"):
        write(committer, {"optimizer.step": halves(WORDS)}, base=(1, arrays[0]))


@pytest.mark.parametrize("rules", [{"resumable": 1}, {"resumable": 1, "delta": 3}, {"resumable": 1, "mantissa_bits": 4}])
def test_a_version_found_before_is_readable_until_collected(
    repository: Repository, clock: FakeClock, rules: dict[str, int]
) -> None:
    weight = np.random.default_rng(2).standard_normal((8, 4000), np.float32)
    arrays = {"model.w": weight, "optimizer.w": weight * 2}
    committer, cut = Committer(repository, "me"), {name: halves(array) for name, array in arrays.items()}
    first, second, _ = (write(committer, cut, base=base) for base in (None, (1, arrays), None))
    found, before = repository.version(2), bits(repository.version(2))
    sent = copy.copy(repository.version(2))  # as if it were sent to another process
    assert found.entry.bases == (first.id,)
    repository.plan_retention(Policy(**rules)).execute()
    assert not any(version.resumable for version in repository.versions()[:2])
    assert found == second
    assert bits(found) == bits(sent) == before
    repository.verify(found)
    clock.time += 2 * 3600
    repository.plan_collection().execute()
    with pytest.raises(Damaged, match="missing"):
        repository.verify(found)


def test_versions_that_others_drop_or_compact_are_skipped(repository: Repository) -> None:
    star(Committer(repository, "me"))
    thinning_all, dropping = repository.plan_retention(Policy(resumable=1)), repository.plan_retention(Policy(keep_last=1))
    assert [entry.id for entry in dropping.dropped] == [1, 2, 3]
    repository.plan_compaction([2]).execute()
    assert [entry.id for entry in dropping.drop()] == [1, 3], "version 2 has a new attempt, which stays"
    compacting = repository.plan_retention(Policy(resumable=1))
    repository.plan_retention(Policy(keep_last=1)).execute()
    for plan in (thinning_all, compacting):
        assert plan.execute() == ()
    assert [version.id for version in repository.versions()] == [4]


def test_a_lease_keeps_a_dropped_version_readable(repository: Repository) -> None:
    """The plan that drops the version was made before the lease."""
    arrays = star(committer := Committer(repository, "me"))
    plan = repository.plan_retention(Policy(keep_last=1))
    reader = LocalAgreement(repository, fall_back=True)
    newest = reader.settle(None, "")
    assert newest is not None
    entry = reader.settle(newest, "it is cut")
    assert entry is not None
    assert (entry.id, entry.bases) == (3, (1,))
    assert [entry.id for entry in plan.drop()] == [1, 2, 3]
    repository.plan_collection(grace=0.0).execute()
    assert as_it_was(reader.version(entry), arrays)
    reader.give_up("")
    assert committer.catalog.root().versions == (newest,)


def test_a_version_kept_only_as_a_base_is_thinned(repository: Repository) -> None:
    arrays = star(Committer(repository, "me"))
    repository.plan_retention(Policy(keep_last=3, resumable=1)).execute()
    assert [version.resumable for version in repository.versions()] == [False, False, False, True]
    assert all(as_it_was(version, arrays) for version in repository.versions())


def test_repair_takes_the_thinned_version_if_a_base_is_lost(repository: Repository, clock: FakeClock) -> None:
    arrays = star(Committer(repository, "me"))
    first = repository.version(1)
    repository.plan_retention(Policy(resumable=1)).execute()
    repository.store.delete([first.record_key])  # a collection starts with the record
    repository.store.delete([keys.ROOT])
    plan_repair(repository.store, clock).execute()
    assert [version.resumable for version in repository.versions()] == [False, False, False, True]
    assert all(as_it_was(version, arrays) for version in repository.versions())


# Repair after the loss of the root


@pytest.mark.parametrize("swapped", [False, True])
def test_repair_prefers_the_whole_version_to_the_thinned_one(
    repository: Repository, committer: Committer, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, *, swapped: bool
) -> None:
    full, light = bits(repository.version(1)), weights(repository.version(1))
    if not swapped:
        monkeypatch.setattr(replacement.Replacement, "_swap", lambda *_: False)
    assert thin(repository) is swapped
    repository.store.delete([keys.ROOT])
    plan_repair(repository.store, clock).execute()
    assert bits(repository.version(1)) == full
    if swapped:
        repository.store.delete([repository.version(1).record_key])  # a collection starts with the record
        repository.store.delete([keys.ROOT])
        plan_repair(repository.store, clock).execute()
        assert bits(repository.version(1)) == light
        assert not repository.version(1).entry.resumable
