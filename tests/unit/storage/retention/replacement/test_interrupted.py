"""Thinning: after any concurrent change or interruption, the version is either unchanged or thinned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from helpers.builders import overwrite_root
from helpers.fake_clock import FakeClock
from helpers.killed_store import Killed, KilledStore
from helpers.scripted_store import script
from helpers.training_versions import bits, collect, thin, weights

from raystow.storage.commit.committer import Committer
from raystow.storage.commit.leases import Lease
from raystow.storage.errors import Damaged, Fenced, StoreUnavailable
from raystow.storage.format import keys
from raystow.storage.object_store import Buffer, ObjectStore
from raystow.storage.repository import Repository
from raystow.storage.retention import replacement
from raystow.storage.retention.policy import Policy
from raystow.storage.stores.memory import MemoryStore


def pinned(repository: Repository) -> None:
    repository.pin(repository.version(1), "good")


def verified(repository: Repository) -> None:
    repository.record_verified(repository.version(1))


def leased(repository: Repository) -> None:
    Lease(repository.store, 1, repository.version(1).attempt, repository.clock).renew()


def dropped(repository: Repository) -> None:
    repository.plan_retention(Policy(keep_last=2)).execute()


def newest_again(repository: Repository) -> None:
    for id in (2, 3):
        repository.pin(repository.version(1), "stays")
        thin(repository, id, 1)
        repository.unpin("stays")
    root = repository.root()
    overwrite_root(repository, lambda _: replace(root, versions=root.versions[:1] + root.versions[2:]))


def thinned(repository: Repository) -> None:
    assert thin(repository)


ANYTHING = (pinned, verified, leased, dropped, newest_again, thinned)
MOMENTS = [(event, moment) for event in ANYTHING for moment in ("before", "before its lease")]
MOMENTS += [(event, "reading") for event in (pinned, verified, leased, newest_again)]  # the other changes respect the lease


@pytest.mark.parametrize(("event", "moment"), MOMENTS)
def test_thinning_yields_to_a_concurrent_change(
    repository: Repository,
    committer: Committer,
    clock: FakeClock,
    event: Callable[[Repository], None],
    moment: str,
) -> None:
    plan = replacement.plan(repository, repository.version(1).entry, replacement.thin(2))
    happened: list[dict[str, dict[str, bytes]]] = []

    def happens(nbytes: int = 0) -> None:
        if not happened:
            happened.append({})
            event(repository)
            happened[0] |= {str(v.entry): weights(v) for v in repository.versions()}

    if moment == "before":
        happens()
    elif moment == "before its lease":
        put = repository.store.put

        def put_after_the_event(key: str, parts: Sequence[Buffer]) -> None:
            if keys.leased(key) is not None:
                happens()
            put(key, parts)

        script(repository.store, put=put_after_the_event)
    assert plan.execute(progress=happens) is None
    assert {str(v.entry): weights(v) for v in repository.versions()} == happened[0]
    clock.time += 4 * 3600
    repository.plan_collection().execute()
    for version in repository.versions():
        repository.verify(version)


def test_a_fenced_coordinator_thins_no_version(repository: Repository, committer: Committer) -> None:
    before = repository.root().versions
    Committer(repository, "other")
    with pytest.raises(Fenced):
        thin(repository, fence=committer.fence)
    assert repository.root().versions == before


def test_a_collection_keeps_an_attempt_that_is_being_written(
    repository: Repository, committer: Committer, clock: FakeClock
) -> None:
    wanted, one_at_a_time = weights(repository.version(1)), threading.Lock()

    def collecting(nbytes: int) -> None:
        with one_at_a_time:
            clock.time += 200.0
            plan = repository.plan_collection()
            assert not plan.due
            plan.execute()

    assert thin(repository, progress=collecting)
    assert bits(repository.version(1)) == wanted


def test_a_slow_writer_whose_attempt_is_collected_fails(repository: Repository, committer: Committer, clock: FakeClock) -> None:
    wanted, one_at_a_time = bits(repository.version(1)), threading.Lock()

    def frozen(nbytes: int) -> None:
        with one_at_a_time:
            if not repository.root().dropped:
                clock.time += 7200.0
                repository.plan_collection().execute()

    assert not thin(repository, progress=frozen)
    assert bits(repository.version(1)) == wanted
    collect(repository, clock)


def test_the_note_of_an_attempt_without_objects_is_removed(
    repository: Repository, committer: Committer, clock: FakeClock
) -> None:
    plan = replacement.plan(repository, repository.version(1).entry, replacement.thin(2))
    assert plan.note(None) is not None
    (garbage,) = repository.plan_collection().garbage
    assert garbage.kept
    collect(repository, clock)
    assert not repository.root().rewrites


# Kills


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_at_any_point_leaves_a_full_or_thin_version(
    repository: Repository, committer: Committer, store: MemoryStore, clock: FakeClock, *, after: bool
) -> None:
    full, light = bits(repository.version(1)), weights(repository.version(1))
    outcomes = []
    for last in range(1, 99):
        interrupted = Repository(KilledStore(store, last, after=after), repository.id, clock=clock)  # type: ignore[arg-type]
        plan = replacement.plan(interrupted, repository.version(1).entry, replacement.thin(2))
        try:
            plan.execute()
        except Killed:
            pass
        version = repository.version(1)
        found = bits(version)
        assert found == (full if version.entry.resumable else light)
        repository.verify(version)
        outcomes.append(version.entry.resumable)
        collect(repository, clock)
        repository.verify(version)
        if not version.entry.resumable:
            break
    assert len(outcomes) > 8
    assert outcomes == [True] * (len(outcomes) - 1) + [False]


def test_a_swap_without_an_answer_is_resolved_by_a_read(repository: Repository, committer: Committer) -> None:
    class AnswerLosingStore:
        def __init__(self, store: ObjectStore) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def put_if(self, key: str, data: bytes, tag: str | None) -> str:
            self._store.put_if(key, data, tag)
            raise StoreUnavailable("no answer", subject=key)

    without_answers = Repository(AnswerLosingStore(repository.store), repository.id, clock=repository.clock)  # type: ignore[arg-type]
    assert thin(without_answers)
    assert not repository.version(1).entry.resumable


def test_a_version_with_damaged_weights_is_not_thinned(repository: Repository, committer: Committer) -> None:
    version = repository.version(1)
    for group, fails in (("optimizer", False), ("weights", True)):
        key = keys.pack(1, version.attempt, 1, group, 0)
        data = repository.store.get(key, max_bytes=1 << 20)
        repository.store.put(key, [bytes([data[0] ^ 1]) + data[1:]])
        if fails:
            with pytest.raises(Damaged, match="weights-00001"):
                thin(repository)
    assert repository.version(1) == version
