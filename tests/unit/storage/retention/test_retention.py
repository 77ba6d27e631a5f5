"""Retention on a repository: a plan made from an old root drops no version that was committed or pinned since."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.builders import empty_record, live_ids, orphans, overwrite_root
from helpers.scripted_store import script, unscript

from raystow.storage.commit.committer import Committer
from raystow.storage.errors import StoreUnavailable
from raystow.storage.format import keys
from raystow.storage.repository import Repository
from raystow.storage.retention.plan import plan_policy
from raystow.storage.retention.policy import Policy


@pytest.fixture
def committer(repository: Repository) -> Committer:
    made = Committer(repository, "me")
    for step in range(1, 6):
        commit(made, step)
    return made


def commit(committer: Committer, step: int) -> None:
    committer.commit(replace(empty_record(committer, step), metrics={"loss": abs(step - 2.0)}))


def test_a_plan_changes_nothing_until_it_is_executed(repository: Repository, committer: Committer) -> None:
    before = repository.root()
    made = repository.plan_retention(Policy(keep_last=2))
    assert repository.root() == before
    assert made.explain()[2:4] == ["version 3 (step 3): dropped: no rule keeps it", "version 4 (step 4): kept: last 2"]
    objects = list(repository.store.list(""))
    assert [gone.id for gone in made.execute()] == [1, 2, 3]
    root = repository.root()
    assert (live_ids(repository), root.next_id, root.epoch) == ([4, 5], before.next_id, before.epoch)
    assert [info.key for info in repository.store.list("")] == [info.key for info in objects]
    assert len(orphans(repository)) == 3


def test_executing_a_plan_again_changes_nothing(repository: Repository, committer: Committer) -> None:
    made = repository.plan_retention(Policy(keep_last=2))
    gone = made.execute()
    root = repository.root()
    assert made.execute() == gone
    assert repository.root() == root


def test_versions_committed_or_pinned_after_the_plan_stay(repository: Repository, committer: Committer) -> None:
    made = repository.plan_retention(Policy(keep_last=1))
    repository.pin(repository.version(2), "good")
    commit(committer, 6)
    assert [gone.id for gone in made.execute()] == [1, 3, 4]
    assert live_ids(repository) == [2, 5, 6]


def test_versions_committed_or_pinned_during_the_swap_stay(repository: Repository, committer: Committer) -> None:
    made = repository.plan_retention(Policy(keep_last=1))
    put_if = repository.store.put_if

    def late(key: str, data: bytes, tag: str | None) -> str:
        unscript(repository.store)
        repository.pin(repository.version(2), "good")
        commit(committer, 6)
        return put_if(key, data, tag)

    script(repository.store, put_if=late)
    assert [gone.id for gone in made.execute()] == [1, 3, 4]
    assert live_ids(repository) == [2, 5, 6]


def test_a_swap_without_an_answer_returns_what_it_dropped(repository: Repository, committer: Committer) -> None:
    made = repository.plan_retention(Policy(keep_last=1))
    put_if = repository.store.put_if

    def lossy(key: str, data: bytes, tag: str | None) -> str:
        unscript(repository.store)
        put_if(key, data, tag)
        commit(committer, 6)
        raise StoreUnavailable("connection reset", subject=key)

    script(repository.store, put_if=lossy)
    assert [gone.id for gone in made.execute()] == [1, 2, 3, 4]
    assert live_ids(repository) == [5, 6]


def test_an_outdated_plan_keeps_the_newest_version(repository: Repository, committer: Committer) -> None:
    old = repository.plan_retention(Policy(keep_last=1))
    commit(committer, 6)
    repository.plan_retention(Policy(keep_last=1)).execute()
    assert live_ids(repository) == [6]
    old.execute()
    assert live_ids(repository) == [6]


def test_a_version_that_has_become_the_newest_stays(repository: Repository, committer: Committer) -> None:
    made = repository.plan_retention(Policy(keep_last=1))
    overwrite_root(repository, lambda root: replace(root, versions=root.versions[:4]))  # no plan removes the newest version
    assert [gone.id for gone in made.execute()] == [1, 2, 3]
    assert live_ids(repository) == [4]


def test_ids_continue_after_versions_are_dropped(repository: Repository, committer: Committer) -> None:
    repository.plan_retention(Policy(keep_last=1)).execute()
    commit(Committer(repository, "next"), 6)
    assert live_ids(repository) == [5, 6]


def test_records_are_read_for_metrics_only(repository: Repository, committer: Committer) -> None:
    best = Policy(keep_best=("loss", "min", 1))
    assert [gone.id for gone in repository.plan_retention(best).dropped] == [1, 3, 4]
    one = repository.version(3)
    repository.store.delete([keys.record(one.id, one.attempt)])
    assert repository.plan_retention(Policy(1, 2, 3.0, None, 4)).dropped


def test_versions_with_unreadable_records_are_kept(
    repository: Repository, committer: Committer, caplog: pytest.LogCaptureFixture
) -> None:
    """The metric is unknown: the version may be the best. The others are not kept for it."""
    one = repository.version(3)
    repository.store.delete([keys.record(one.id, one.attempt)])
    made = repository.plan_retention(Policy(keep_best=("loss", "min", 1)))
    assert [gone.id for gone in made.execute()] == [1, 4]
    assert made.explain()[2] == "version 3 (step 3): kept: unreadable record"
    assert f"keeps version 3, whose record, and so metric, cannot be read: {keys.record(one.id, one.attempt)}" in caplog.text


def test_a_store_that_is_down_is_no_unreadable_record(repository: Repository, committer: Committer) -> None:
    get = repository.store.get

    def down(key: str, **options: Any) -> bytes:
        if key.endswith("version.json"):
            raise StoreUnavailable("is down")
        return bytes(get(key, **options))

    script(repository.store, get=down)
    with pytest.raises(StoreUnavailable):
        repository.plan_retention(Policy(keep_best=("loss", "min", 1)))


def test_metrics_of_dropped_versions_are_removed(repository: Repository, committer: Committer) -> None:
    """Otherwise a coordinator would keep the metrics of each version that it has committed."""
    known: dict[str, dict[str, object]] = {}
    for step in range(1, 6):
        commit(committer, step)
        plan_policy(committer.catalog, Policy(keep_last=1, keep_best=("loss", "min", 1)), known=known).drop(committer.fence)
    assert len(known) == 3  # the versions of the last plan


def test_a_plan_of_an_empty_repository_is_empty(repository: Repository) -> None:
    made = repository.plan_retention(Policy(keep_last=1, keep_best=("loss", "min", 1)))
    assert (made.decisions, made.execute()) == ((), ())
