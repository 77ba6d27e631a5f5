"""A rollback selects the newest version among all listed versions: later saves continue from it, and rolled-back versions can
be selected again.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from helpers.builders import empty_record
from helpers.scripted_store import script, unscript

from raystow.orchestrator.restore.agreement import LocalAgreement
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Damaged, NotFound, SaveFailed, StoreUnavailable
from raystow.storage.format.root import RolledBack, Root
from raystow.storage.repository import Repository
from raystow.storage.retention.policy import Policy


@pytest.fixture
def nine(committer: Committer) -> Repository:
    """Return a repository with versions 1 to 9."""
    save(committer, 9)
    return committer.catalog


def save(committer: Committer, number: int = 1) -> None:
    committer.notice(committer.catalog.root())
    for _ in range(number):
        committer.commit(empty_record(committer, 1))


def back_to(repository: Repository, id: int) -> list[int]:
    return [version.id for version in repository.rollback(id)]


def live(repository: Repository) -> list[int]:
    return [version.id for version in repository.versions()]


def rolled_back(repository: Repository) -> list[int]:
    return [version.id for version in repository.rolled_back()]


def test_newer_versions_are_listed_but_never_latest(nine, committer):
    assert back_to(nine, 6) == [7, 8, 9]
    assert (live(nine), rolled_back(nine)) == ([1, 2, 3, 4, 5, 6], [7, 8, 9])
    assert nine.latest() == nine.version(6)
    assert LocalAgreement(nine, fall_back=True).settle(None, "") == nine.version(6).entry
    assert nine.version(8).step == 1
    with nine.lease(nine.version(8)):
        nine.verify(nine.version(8))
    save(committer)
    assert nine.latest() == nine.version(10)


def test_ranks_fall_back_along_the_history_only(nine, committer):
    back_to(nine, 6)
    save(committer)
    alone = LocalAgreement(nine, fall_back=True)
    tried = [alone.settle(None, "")]
    while tried[-1].id > 1:
        tried.append(alone.settle(tried[-1], "damaged"))
    assert [entry.id for entry in tried] == [10, 6, 5, 4, 3, 2, 1]
    with pytest.raises(Damaged, match="no version is whole"):
        alone.settle(tried[-1], "damaged")


def test_a_rollback_to_the_former_newest_version_undoes_it(nine):
    before = nine.root()
    back_to(nine, 6)
    assert back_to(nine, 9) == []
    after = nine.root()
    assert (after.versions, after.rolled_back, after.rollbacks) == (before.versions, (), 2)


def test_a_rollback_can_be_undone_after_new_saves(nine, committer):
    back_to(nine, 6)
    save(committer, 2)
    assert back_to(nine, 9) == [10, 11]
    assert (live(nine), rolled_back(nine)) == ([*range(1, 10)], [10, 11])
    assert back_to(nine, 11) == [7, 8, 9]
    assert live(nine) == [1, 2, 3, 4, 5, 6, 10, 11]


def test_a_rolled_back_version_can_be_selected(nine):
    back_to(nine, 6)
    back_to(nine, 8)
    assert (live(nine), rolled_back(nine)) == ([*range(1, 9)], [9])


def test_a_second_rollback_keeps_the_first(nine, committer):
    back_to(nine, 6)
    save(committer, 2)
    assert back_to(nine, 10) == [11]
    assert (live(nine), rolled_back(nine)) == ([1, 2, 3, 4, 5, 6, 10], [7, 8, 9, 11])
    assert back_to(nine, 5) == [6, 10]
    assert back_to(nine, 8) == []
    assert (live(nine), rolled_back(nine)) == ([*range(1, 9)], [9, 10, 11])


def test_alternating_histories_stay_separate(nine, committer):
    """The ids of the versions of the two histories alternate."""
    back_to(nine, 6)
    save(committer)
    for newest in (9, 10, 11, 12):
        back_to(nine, newest)
        save(committer)
    histories = {14: [1, 2, 3, 4, 5, 6, 10, 12, 14], 13: [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13]}
    for newest, history in histories.items():
        back_to(nine, newest)
        assert live(nine) == history


def test_a_history_loses_only_its_dropped_versions(nine, committer):
    back_to(nine, 6)
    save(committer, 2)
    nine.pin(nine.version(3), "a")
    nine.pin(nine.version(8), "b")
    nine.plan_retention(Policy(keep_last=1)).execute()
    assert nine.root().rolled_back == (RolledBack(nine.version(8).entry, 3, nine.root().rolled_back[0].at),)
    back_to(nine, 8)
    assert (live(nine), rolled_back(nine)) == ([3, 8], [11])
    assert back_to(nine, 11) == [8]
    assert live(nine) == [3, 11]


def test_a_save_begun_before_the_rollback_fails(nine, committer):
    under_way = empty_record(committer, 1)
    back_to(nine, 6)
    with pytest.raises(SaveFailed, match="rolled back since the save began"):
        committer.commit(under_way)
    with pytest.raises(SaveFailed, match="rolled back since the save began"):
        committer.commit(under_way)
    committer.commit(empty_record(committer, 2))  # the committer has noticed the rollback
    assert live(nine) == [1, 2, 3, 4, 5, 6, 11]


def test_a_rollback_to_the_newest_fails_saves_in_progress(nine, committer):
    under_way = empty_record(committer, 1)
    assert back_to(nine, 9) == []
    with pytest.raises(SaveFailed, match="rolled back since the save began"):
        committer.commit(under_way)
    assert live(nine) == [*range(1, 10)]


def test_a_new_coordinator_knows_of_earlier_rollbacks(nine):
    back_to(nine, 6)
    other = Committer(nine, "other")
    other.commit(empty_record(other, 1))
    assert live(nine)[-1] == 10


def test_a_rolled_back_commit_without_an_answer_succeeds(nine, committer):
    """The commit does not fail, and its objects are not discarded."""
    record = empty_record(committer, 1)
    committer.commit(record)
    back_to(nine, 6)
    assert committer.commit(record) == nine.version(10)
    objects = [info.key for info in nine.store.list("versions/")]
    committer.discard(record.id, record.attempt)
    assert [info.key for info in nine.store.list("versions/")] == objects


def test_rolled_back_versions_are_not_garbage(nine):
    back_to(nine, 6)
    assert nine.plan_collection(grace=0.0).garbage == ()


def test_a_rollback_keeps_pins_and_verified_live_versions(nine):
    nine.pin(nine.version(8), "evidence")
    nine.record_verified(nine.version(7))
    back_to(nine, 7)
    assert nine.root().verified == 7
    back_to(nine, 6)
    assert (nine.root().verified, nine.root().pins) == (0, {"evidence": 8})
    assert nine.record_verified(nine.version(9), nine.version(5)) == 5
    nine.pin(nine.version(9), "more evidence")


def test_a_rollback_to_a_dropped_version_is_refused(nine):
    version = nine.version(2)
    nine.plan_retention(Policy(keep_last=1)).execute()
    with pytest.raises(NotFound, match="version 2 was dropped"):
        nine.rollback(version)


def test_a_reader_keeps_the_version_that_it_opened(nine):
    version = nine.version(9)
    back_to(nine, 6)
    with nine.lease(version):
        pass
    nine.plan_retention(Policy(drop_rolled_back=True)).execute()
    with pytest.raises(NotFound, match="dropped meanwhile"), nine.lease(version):
        pass


@pytest.mark.parametrize("others", list(itertools.product([False, True], repeat=3)), ids=str)
def test_a_lost_answer_is_distinguished_from_a_lost_race(nine, committer, others):
    """The swap succeeds and its answer is lost; others commit, pin, or roll back to the same version before the root is read."""
    committed, pinned, again = others
    put, lost = nine.store.put_if, []

    def loses_an_answer(key, data, tag):
        found = put(key, data, tag)
        if not lost:
            lost.append(data)
            if committed:
                save(committer)
            if pinned:
                nine.pin(nine.version(8), "b")
            if again:
                nine.rollback(6)
            raise StoreUnavailable("lost", subject=key)
        return found

    script(nine.store, put_if=loses_an_answer)
    assert back_to(nine, 6) == [7, 8, 9]
    assert nine.root().rollbacks == 1 + again
    assert live(nine)[6:] == ([10] if committed and not again else [])


@pytest.mark.parametrize(
    ("id", "other", "gone", "rollbacks"),
    [
        (6, lambda nine, committer: save(committer), [7, 8, 9, 10], 1),
        (6, lambda nine, committer: nine.rollback(8), [7, 8], 2),
        (6, lambda nine, committer: nine.rollback(3), [], 2),
        # saves in progress must fail, although no version is rolled back
        (9, lambda nine, committer: nine.pin(nine.version(8), "b"), [], 1),
    ],
    ids=["committed", "rolled_back_less", "rolled_back_more", "pinned"],
)
def test_a_rollback_is_made_after_a_lost_race(nine, committer, id, other, gone, rollbacks):
    put, raced = nine.store.put_if, []

    def loses_a_race(key, data, tag):
        if not raced:
            raced.append(data)
            other(nine, committer)
        return put(key, data, tag)

    script(nine.store, put_if=loses_a_race)
    assert back_to(nine, id) == gone
    assert (live(nine)[-1], nine.root().rollbacks) == (id, rollbacks)


def test_a_version_dropped_during_a_rollback_is_not_found(nine):
    put = nine.store.put_if

    def late(key, data, tag):
        unscript(nine.store)
        nine.plan_retention(Policy(keep_last=1)).execute()
        return put(key, data, tag)

    script(nine.store, put_if=late)
    with pytest.raises(NotFound, match="version 6 was dropped meanwhile"):
        nine.rollback(6)


def test_the_root_survives_dump_and_load(nine):
    back_to(nine, 6)
    root = nine.root()
    assert Root.load(root.dump()) == root
    older = replace(root, rollbacks=0, rolled_back=())
    assert Root.load(older.dump()) == older


@pytest.mark.parametrize("broken", [{"after": 7}, {"after": -1}, {"at": "now"}], ids=str)
def test_invalid_rolled_back_entries_are_refused(nine, broken):
    back_to(nine, 6)
    root = nine.root()
    first, *rest = root.rolled_back
    with pytest.raises(Damaged):
        Root.load(replace(root, rolled_back=(replace(first, **broken), *rest)).dump())


def test_rolled_back_ids_ascend(nine):
    back_to(nine, 6)
    root = nine.root()
    with pytest.raises(Damaged, match="not ascending"):
        Root.load(replace(root, rolled_back=root.rolled_back[::-1]).dump())
