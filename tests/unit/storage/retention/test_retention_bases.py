"""Retention and deltas: the base of a delta stays as long as the delta."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.builders import difference, empty_record, entry
from hypothesis import given
from hypothesis import strategies as st

from raystow.storage.commit.committer import Committer
from raystow.storage.errors import SaveFailed
from raystow.storage.format.root import Entry
from raystow.storage.format.version_record import FragmentInfo
from raystow.storage.repository import Repository
from raystow.storage.retention.policy import Policy, plan
from raystow.storage.versions.version import Version


@pytest.mark.parametrize(
    ("policy", "ids"),
    [
        (Policy(keep_last=1), [4, 6, 7]),  # version 7 is a delta to version 6, and version 6 to version 4
        (Policy(keep_last=3), [1, 4, 5, 6, 7]),
        (Policy(keep_last=1, max_bytes=1), [4, 6, 7]),  # no base can be dropped
        (Policy(keep_last=3, max_bytes=45), [4, 6, 7]),  # version 1 is needed by version 5 only, and is dropped with it
        (Policy(max_bytes=55), [1, 4, 5, 6, 7]),
        (Policy(max_bytes=35), [4, 6, 7]),
    ],
)
def test_the_bases_of_kept_versions_are_kept(policy: Policy, ids: list[int]) -> None:
    entries = [entry(1), difference(2, 1), difference(3, 1), entry(4), difference(5, 1), difference(6, 4), difference(7, 6)]
    assert [d.entry.id for d in plan(entries, policy, pins={}, metrics={}) if d.keep] == ids


def test_the_plan_names_the_version_that_needs_a_base() -> None:
    entries = [entry(1), difference(2, 1), difference(3, 1), difference(4, 3)]
    why = {d.entry.id: d.why for d in plan(entries, Policy(keep_last=1), pins={}, metrics={})}
    assert why[1] == "base of version 3"
    assert why[2] == "no rule keeps it"
    assert why[3] == "base of version 4"
    alone = plan([entry(1), entry(2), entry(3)], Policy(keep_last=1), pins={}, metrics={}, bases=[2])
    assert [d.why for d in alone] == ["no rule keeps it", "base of a save under way", "newest, last 1"]


@given(st.data())
def test_no_plan_leaves_a_version_without_its_bases(data: st.DataObject) -> None:
    entries: list[Entry] = []
    for id in range(1, data.draw(st.integers(2, 12))):
        bases = data.draw(st.sets(st.integers(1, id - 1), max_size=2)) if id > 1 else ()
        entries.append(difference(id, *sorted(bases), stored=data.draw(st.integers(0, 20))))
    one = st.none() | st.integers(1, 5)
    policy = Policy(data.draw(one), max_bytes=data.draw(st.none() | st.integers(1, 150)))
    pins = dict.fromkeys(data.draw(st.sets(st.sampled_from("ab"))), data.draw(st.integers(1, 12)))
    decisions = plan(entries, policy, pins=pins, metrics={})
    ids = {d.entry.id for d in decisions if d.keep}
    assert all(set(d.entry.bases) <= ids for d in decisions if d.keep)
    alike = plan([replace(one, bases=()) for one in entries], policy, pins=pins, metrics={})
    if policy.max_bytes is None:
        assert ids >= {d.entry.id for d in alike if d.keep}
    needless = [d for d in decisions if d.keep and d.why.startswith("base of")]
    assert all(any(d.entry.id in other.entry.bases for other in decisions if other.keep) for d in needless)


def write_difference(committer: Committer, *bases: int) -> Version:
    """Commit a version whose record names these bases."""
    info = FragmentInfo(0, 1, "ab" * 32, (0,), 0, 0, 0, bases=bases)
    return committer.commit(replace(empty_record(committer), fragments=(info,)))


def test_a_base_stays_for_a_commit_after_the_plan(repository: Repository) -> None:
    committer = Committer(repository, "me")
    first, second = (committer.commit(empty_record(committer)) for _ in range(2))
    plan = repository.plan_retention(Policy(keep_last=1))
    assert plan.dropped == (first.entry,)
    third = write_difference(committer, first.id)
    assert plan.execute() == ()
    assert repository.versions() == [first, second, third]
    assert repository.plan_retention(Policy(keep_last=1)).execute() == (second.entry,)


def test_no_commit_succeeds_whose_base_was_dropped(repository: Repository) -> None:
    committer = Committer(repository, "me")
    first, second = (committer.commit(empty_record(committer)) for _ in range(2))
    late = replace(empty_record(committer), fragments=(FragmentInfo(0, 1, "ab" * 32, (0,), 0, 0, 0, bases=(first.id,)),))
    assert repository.plan_retention(Policy(keep_last=1)).execute() == (first.entry,)
    with pytest.raises(SaveFailed, match=f"version {first.id}"):
        committer.commit(late)
    assert repository.versions() == [second]
    assert committer.commit(empty_record(committer)).id == late.id + 1, "the next save succeeds"


def test_a_lease_protects_the_bases_of_its_version(repository: Repository) -> None:
    committer = Committer(repository, "me")
    first = committer.commit(empty_record(committer))
    second = write_difference(committer, first.id)
    committer.commit(empty_record(committer))
    drop_plan = repository.plan_retention(Policy(keep_last=1))
    with repository.lease(second):
        assert drop_plan.execute() == (first.entry, second.entry)
        assert repository.plan_collection(grace=0).execute().attempts == 0
    assert repository.plan_collection(grace=0).execute().attempts == 2


def test_releasing_a_pin_keeps_the_bases_of_other_versions(repository: Repository) -> None:
    committer = Committer(repository, "me")
    first = committer.commit(empty_record(committer))
    repository.pin(first, "a")
    second = write_difference(committer, first.id)
    committer.commit(empty_record(committer))
    repository.pin(second, "b")
    assert repository.plan_release(["a"]).execute() == ()
    assert repository.root().pins == {"a": first.id, "b": second.id}
    assert repository.plan_release(["a", "b"]).execute() == (first.entry, second.entry)
