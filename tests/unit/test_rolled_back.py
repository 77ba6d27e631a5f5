"""A rollback chooses which listed version is the newest: later saves continue it, and what it left can be chosen again."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from builders import empty_record

from raystow.orchestrator.restore.agreement import LocalAgreement
from raystow.storage.committer import Committer
from raystow.storage.errors import Damaged, NotFound, SaveFailed, StoreUnavailable
from raystow.storage.format.root import RolledBack, Root
from raystow.storage.repository import Repository
from raystow.storage.retention.policy import Policy
from raystow.storage.stores.memory import MemoryStore


@pytest.fixture
def nine(committer: Committer) -> Repository:
    """A repository with versions 1 to 9."""
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


def test_a_rollback_to_what_was_newest_undoes_it(nine):
    before = nine.root()
    back_to(nine, 6)
    assert back_to(nine, 9) == []
    after = nine.root()
    assert (after.versions, after.rolled_back, after.rollbacks) == (before.versions, (), 2)


def test_it_is_undone_also_after_new_saves(nine, committer):
    back_to(nine, 6)
    save(committer, 2)
    assert back_to(nine, 9) == [10, 11]
    assert (live(nine), rolled_back(nine)) == ([*range(1, 10)], [10, 11])
    assert back_to(nine, 11) == [7, 8, 9]
    assert live(nine) == [1, 2, 3, 4, 5, 6, 10, 11]


def test_part_of_what_was_rolled_back_is_chosen(nine):
    back_to(nine, 6)
    back_to(nine, 8)
    assert (live(nine), rolled_back(nine)) == ([*range(1, 9)], [9])


def test_a_second_rollback_leaves_the_first_as_it_is(nine, committer):
    back_to(nine, 6)
    save(committer, 2)
    assert back_to(nine, 10) == [11]
    assert (live(nine), rolled_back(nine)) == ([1, 2, 3, 4, 5, 6, 10], [7, 8, 9, 11])
    assert back_to(nine, 5) == [6, 10]
    assert back_to(nine, 8) == []
    assert (live(nine), rolled_back(nine)) == ([*range(1, 9)], [9, 10, 11])


def test_histories_stay_apart_however_often_they_alternate(nine, committer):
    """The versions of two histories have ids between each other's."""
    back_to(nine, 6)
    save(committer)
    for newest in (9, 10, 11, 12):
        back_to(nine, newest)
        save(committer)
    histories = {14: [1, 2, 3, 4, 5, 6, 10, 12, 14], 13: [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13]}
    for newest, history in histories.items():
        back_to(nine, newest)
        assert live(nine) == history


def test_a_history_loses_what_is_dropped_and_nothing_else(nine, committer):
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


def test_a_save_that_began_before_is_never_a_version(nine, committer):
    under_way = empty_record(committer, 1)
    back_to(nine, 6)
    with pytest.raises(SaveFailed, match="rolled back since the save began"):
        committer.commit(under_way)
    with pytest.raises(SaveFailed, match="rolled back since the save began"):
        committer.commit(under_way)
    committer.commit(empty_record(committer, 2))  # the refusal was noticed
    assert live(nine) == [1, 2, 3, 4, 5, 6, 11]


def test_a_rollback_to_the_newest_refuses_what_is_under_way(nine, committer):
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


def test_a_rolled_back_commit_without_an_answer_is_done(nine, committer):
    """Neither is it a failure, nor are its objects discarded."""
    record = empty_record(committer, 1)
    committer.commit(record)
    back_to(nine, 6)
    assert committer.commit(record) == nine.version(10)
    objects = [info.key for info in nine.store.list("versions/")]
    committer.discard(record.id, record.attempt)
    assert [info.key for info in nine.store.list("versions/")] == objects


def test_no_rolled_back_version_is_garbage(nine):
    back_to(nine, 6)
    assert nine.plan_collection(grace=0.0).garbage == ()


def test_pins_stay_and_a_verified_version_only_if_it_is_live(nine):
    nine.pin(nine.version(8), "evidence")
    nine.record_verified(nine.version(7))
    back_to(nine, 7)
    assert nine.root().verified == 7
    back_to(nine, 6)
    assert (nine.root().verified, nine.root().pins) == (0, {"evidence": 8})
    assert nine.record_verified(nine.version(9), nine.version(5)) == 5
    nine.pin(nine.version(9), "more evidence")


def test_a_dropped_version_is_refused(nine):
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
def test_a_lost_answer_is_told_from_a_lost_race(nine, committer, monkeypatch, others):
    """The swap takes effect, its answer is lost, and others commit, pin, or roll back to the same version before it is read."""
    committed, pinned, again = others
    put, lost = MemoryStore.put_if, []

    def loses_an_answer(self, key, data, tag):
        found = put(self, key, data, tag)
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

    monkeypatch.setattr(MemoryStore, "put_if", loses_an_answer)
    assert back_to(nine, 6) == [7, 8, 9]
    assert nine.root().rollbacks == 1 + again
    assert live(nine)[6:] == ([10] if committed and not again else [])


def test_a_version_committed_meanwhile_is_rolled_back_too(nine, committer, monkeypatch):
    put, raced = MemoryStore.put_if, []

    def loses_a_race(self, key, data, tag):
        if not raced:
            raced.append(data)
            save(committer)
        return put(self, key, data, tag)

    monkeypatch.setattr(MemoryStore, "put_if", loses_a_race)
    assert back_to(nine, 6) == [7, 8, 9, 10]
    assert live(nine)[-1] == 6


def test_the_root_is_read_as_it_was_written(nine):
    back_to(nine, 6)
    root = nine.root()
    assert Root.load(root.dump()) == root
    older = replace(root, rollbacks=0, rolled_back=())
    assert Root.load(older.dump()) == older


@pytest.mark.parametrize("broken", [{"after": 7}, {"after": -1}, {"at": "now"}], ids=str)
def test_a_damaged_list_is_refused(nine, broken):
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
