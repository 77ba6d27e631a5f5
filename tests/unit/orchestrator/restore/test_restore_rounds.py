"""Restore rounds: all ranks restore one version and fall back together, and each wait has a deadline."""

from __future__ import annotations

import pytest
from helpers.builders import empty_record
from helpers.processes import A0, A1, B0, B1, incarnation
from helpers.restoring_run import RestoringRun
from helpers.scripted_store import script, unscript

from raystow.orchestrator.restore.round import RestoreRound
from raystow.orchestrator.restore.rounds import RestoreRounds
from raystow.storage.errors import ClusterError, Damaged, DeadlineExceeded, NotFound, RankRestarted, StateError, StoreUnavailable
from raystow.storage.format.root import Entry
from raystow.storage.retention.policy import Policy
from raystow.workers.protocol.messages import RankReading, RestoreChoice, RestoreVote


@pytest.fixture
def run() -> RestoringRun:
    return RestoringRun()


def test_an_empty_repository_has_no_version_to_restore(run):
    assert run.vote(0).answer(None) is None
    assert run.vote(1).answer(None) is None


def test_a_commit_between_two_votes_changes_no_choice(run):
    (old,) = run.commit(1)
    assert run.vote(0).answer(None) == old
    (new,) = run.commit(1)
    first, second = run.vote(0, old), run.vote(1)
    assert second.answer(None) == old
    assert not first.answers(old)  # the other rank has not restored it yet
    run.vote(1, old)
    assert first.answers(old)
    assert first.answer(old) == old
    assert run.vote(0, number=2).answer(None) == new


def test_a_restore_begins_when_all_ranks_have_joined(run):
    """All ranks then receive the nodes of the round."""
    (entry,) = run.commit(1)
    round = run.rounds.vote(RestoreVote(0, 3, A0, 1, 60.0, node="node b"))
    run.rounds.vote(RestoreVote(1, 3, A1, 1, 60.0, node="node b"))
    changes = run.rounds.changes
    assert not round.answers(None)
    run.rounds.vote(RestoreVote(2, 3, incarnation("a2"), 1, 60.0, node="node a"))
    assert round.answers(None)
    assert run.rounds.changes > changes
    assert round.group.nodes == ("node a", "node b")
    for rank in range(3):
        run.rounds.vote(RestoreVote(rank, 3, incarnation(f"a{rank}"), 1, 60.0, entry))
    again = run.rounds.vote(RestoreVote(0, 3, A0, 2, 60.0, node="node c"))
    assert not again.answers(None)
    for rank in (1, 2):
        run.rounds.vote(RestoreVote(rank, 3, incarnation(f"a{rank}"), 2, 60.0, node="node c"))
    assert again.group.nodes == ("node c",)
    assert again.group.round != round.group.round


def test_a_rank_that_never_joins_is_named_after_the_deadline(run):
    run.commit(1)
    round = run.vote(0)
    for _ in range(2):
        run.clock.time += 40
        run.vote(0)  # a repetition
        run.rounds.tick()
    assert round.answers(None)
    with pytest.raises(DeadlineExceeded, match=r"rank 1 "):
        round.answer(None)


def test_all_ranks_fall_back_if_one_finds_damage(run, caplog):
    _, older, newest = run.commit(3)
    first, group, changes = run.vote(0), run.vote(1).group, run.rounds.changes
    for _ in range(2):  # the first answers are lost
        run.vote(0, newest), run.vote(1, newest, "versions/3/weights.pack: the object is cut")
    assert first.answers(newest)
    assert (first.answer(newest), first.group, run.rounds.changes) == (older, group, changes + 1)
    assert "VERSION 3 (step 2) IS DAMAGED, falling back to version 2 (step 1): rank 1: versions/3/weights.pack" in caplog.text
    for rank in range(2):
        assert run.vote(rank, older).answer(older) == older
    assert first.done
    assert len(run.damaged) == 1


def test_a_thinned_version_is_skipped_and_not_damaged(run, caplog):
    """Damage that one rank reports is used whatever other ranks report. Reports about one version do not affect the next
    version.
    """
    last, middle, newest = run.commit(3)
    first, _ = run.vote(0), run.vote(1)

    def say(rank, entry, damage, whole):
        run.rounds.vote(RestoreVote(rank, 2, incarnation(f"a{rank}"), 1, 60.0, entry, damage, whole=whole))

    say(0, newest, "it is cut", False)
    say(1, newest, "it was thinned", True)
    assert (first.answer(newest), len(run.damaged)) == (middle, 1)
    say(0, middle, "it was thinned", True)
    say(1, middle, "", True)
    assert (first.answer(middle), len(run.damaged)) == (last, 1)
    assert "version 2 (step 1) holds too little, falling back to version 1 (step 0): rank 0: it was thinned" in caplog.text
    assert caplog.text.count("IS DAMAGED") == 1
    say(0, last, "it was thinned", True)
    say(1, last, "it was thinned", True)
    with pytest.raises(Damaged, match="no version is whole and holds all that is asked for; the last, 1: rank 0"):
        first.answer(last)


def test_all_ranks_get_an_error_if_no_version_is_whole(run):
    (only,) = run.commit(1)
    run.vote(0), run.vote(1)
    run.vote(0, only)
    round = run.vote(1, only, "it is cut")
    assert round.answers(only)
    with pytest.raises(Damaged, match="no version is whole; the last, 1: rank 1: it is cut"):
        round.answer(only)


def test_no_rank_continues_if_the_next_version_is_not_leased(run):
    _, newest = run.commit(2)
    round = run.vote(0, run.vote(0).answer(None))
    run.vote(1)

    def down(*_: object, **__: object) -> None:
        raise StoreUnavailable("503", subject="root.json")

    script(run.repository.store, get_tagged=down)
    run.vote(1, newest, "it is cut")
    assert round.answers(newest)
    with pytest.raises(StoreUnavailable, match=r"root\.json: 503"):
        round.answer(newest)
    assert run.vote(1, newest) is round


def test_the_version_being_restored_is_leased(run):
    old, new = run.commit(2)
    run.vote(0)
    assert run.leases() == [(new.id, new.attempt)]
    run.vote(1)
    for rank in range(2):
        run.vote(rank, new, "damaged")
    assert run.leases() == [(old.id, old.attempt)]
    assert run.repository.plan_retention(Policy(keep_last=1)).dropped == ()
    for rank in range(2):
        run.vote(rank, old)
    assert run.leases() == []


def test_a_rank_that_gives_up_ends_the_round_for_all(run):
    (entry,) = run.commit(1)
    run.vote(0), run.vote(1)
    waiting = run.vote(0, entry)
    run.vote(1, error="into: names do not match")
    with pytest.raises(ClusterError, match="rank 1 could not restore: into: names"):
        waiting.answer(entry)
    assert run.leases() == []


def test_a_busy_rank_gets_the_error_with_its_next_call(run):
    (entry,) = run.commit(1)
    run.vote(0), run.vote(1)
    run.vote(1, error="into: names do not match")
    round = run.vote(0, entry)
    assert round.answers(entry)
    with pytest.raises(ClusterError, match="rank 1 could not restore: into: names"):
        round.answer(entry)
    assert not run.vote(0, number=2).answers(None), "the next restore is a new round"


def test_a_rank_without_a_choice_tries_after_a_failure(run):
    """The cause of the failure may affect this rank as well, and then its own error is more specific."""
    (entry,) = run.commit(1)
    untold = run.vote(0)
    run.vote(1), run.vote(1, error="into: names do not match")
    assert untold.answers(None)
    assert untold.answer(None) == entry
    with pytest.raises(ClusterError, match="rank 1 could not restore: into: names"):
        run.vote(0, entry).answer(entry)


@pytest.mark.parametrize("again", [{"process": "b"}, {"number": 2}])
def test_a_rank_that_restarts_its_restore_ends_the_round(run, again):
    (entry,) = run.commit(1)
    old = run.vote(1, run.vote(1).answer(None))
    run.vote(0)
    new = run.vote(0, **again)
    assert old.answers(entry)
    with pytest.raises(ClusterError, match="rank 0 has begun another restore"):
        old.answer(entry)
    assert new.answer(None) == entry


def test_a_restarted_process_ends_the_round_of_its_old_process(run):
    run.commit(1)
    round = run.vote(0)
    run.rounds.left(0, A0), run.rounds.left(1, B1)
    assert not round.failure
    run.rounds.left(0, B0)
    with pytest.raises(RankRestarted, match="rank 0 was restarted"):
        round.answer(None)


def test_a_rank_that_never_finishes_is_named_after_the_deadline(run):
    (entry,) = run.commit(1)
    round = run.vote(0, run.vote(0).answer(None))
    run.clock.time += 59
    run.rounds.tick()
    assert not round.answers(entry)
    run.clock.time += 2
    run.rounds.tick()
    with pytest.raises(DeadlineExceeded, match=r"rank 1 "):
        round.answer(entry)


def test_ranks_wait_for_a_rank_that_reads_on(run):
    """Votes that the waiting rank repeats meanwhile are no reason to wait longer."""
    (entry,) = run.commit(1)
    round = run.vote(0, run.vote(0).answer(None))
    run.vote(1)
    for _ in range(9):
        run.clock.time += 40
        run.rounds.reading(RankReading(1, A1, 1, 60.0))
        run.rounds.tick()
        assert run.vote(0, entry) is round
        assert not round.answers(entry)
    run.clock.time += 30
    run.vote(0, entry)
    for other in (RankReading(1, B1, 1, 60.0), RankReading(1, A1, 2, 60.0), RankReading(0, A0, 1, 60.0)):
        run.rounds.reading(other)
    run.clock.time += 31
    run.rounds.tick()
    with pytest.raises(DeadlineExceeded, match=r"rank 1 "):
        round.answer(entry)


def test_a_repeated_vote_is_answered_after_the_end(run):
    """The last rank has finished when another rank is about to repeat its vote."""
    (entry,) = run.commit(1)
    round = run.vote(0, run.vote(0).answer(None))
    run.vote(1)
    run.vote(1, entry)
    assert run.vote(0, entry) is round
    assert round.answer(entry) == entry
    assert len(run.rounds.restored()) == 1


def test_another_world_size_ends_the_old_round(run):
    run.commit(1)
    round = run.vote(0)
    run.rounds.vote(RestoreVote(0, 3, B0, 1, 60.0))
    with pytest.raises(ClusterError, match="world size changed from 2 to 3"):
        round.answer(None)


def in_memory(run: RestoringRun) -> RestoreChoice:
    record = empty_record(run.committer, 9)
    return RestoreChoice(record.entry(b"digest", 7), {0: ["node"]}, record.dump())


def test_a_save_in_memory_comes_before_the_newest_version(run):
    (newest,) = run.commit(1)
    held = in_memory(run)
    round = run.rounds.vote(RestoreVote(0, 2, A0, 1, 60.0), held)
    assert round.answer(None) == held.entry
    assert run.vote(1).answer(None) == held.entry  # although no save is in memory any more when the second rank votes
    assert run.leases() == []
    run.vote(0, held.entry)
    assert run.vote(1, held.entry, "the pack is missing").answer(held.entry) == newest
    assert run.leases() == [(newest.id, newest.attempt)]


def test_a_save_in_memory_must_be_allowed_and_newer(run):
    held = in_memory(run)
    (newest,) = run.commit(1)
    assert run.rounds.vote(RestoreVote(0, 2, A0, 1, 60.0), held).answer(None) == newest
    held = in_memory(run)
    assert run.rounds.vote(RestoreVote(0, 2, A0, 2, 60.0, allow_uncommitted=False), held).answer(None) == newest
    assert run.rounds.vote(RestoreVote(0, 2, A0, 3, 60.0), held).answer(None) == held.entry


def test_a_rollback_excludes_later_versions_and_older_saves(run):
    """A rolled-back version and a save in memory that began before the rollback are excluded. A save that began after it is a
    candidate.
    """
    chosen, _ = run.commit(2)
    held = in_memory(run)
    run.repository.rollback(run.repository.at(chosen))
    assert run.rounds.vote(RestoreVote(0, 2, A0, 1, 60.0), held).candidates == [chosen]
    assert run.vote(1).answer(None) == chosen
    run.vote(0, chosen)
    assert run.vote(1, chosen).answer(chosen) == chosen
    held = in_memory(run)
    assert run.rounds.vote(RestoreVote(0, 2, A0, 2, 60.0), held).candidates == [held.entry, chosen]


def test_a_rollback_during_a_restore_changes_no_choice(run):
    """The ranks agreed on the version before, and some ranks may have restored it."""
    _, newest = run.commit(2)
    run.vote(0)
    run.repository.rollback(run.repository.version(1))
    assert run.vote(1).answer(None) == newest
    run.vote(0, newest)
    assert run.vote(1, newest).answer(newest) == newest
    assert run.vote(0, number=2).answer(None).id == 1


def test_a_known_rollback_is_respected_without_the_store(run):
    run.commit(2)
    run.repository.rollback(run.repository.version(1))
    run.known.root()

    def down(*_: object, **__: object) -> None:
        raise StoreUnavailable("503", subject="root.json")

    script(run.repository.store, get_tagged=down)
    assert [entry.id for entry in run.vote(0).candidates] == [1]


def test_without_the_store_known_versions_are_restored(run):
    """These versions are not leased."""
    (old,) = run.commit(1)
    assert run.vote(0).answer(None) == old
    (new,) = run.commit(1)
    run.known.committed(run.committer.root)

    def down(*_: object, **__: object) -> None:
        raise StoreUnavailable("503", subject="root.json")

    def put(key: str, parts: object) -> None:
        raise AssertionError(f"{key} is written, which waits minutes for a store that is down")

    script(run.repository.store, get_tagged=down, put=put)
    round = run.vote(0, number=2)
    assert round.answer(None) == new
    run.vote(1)
    run.vote(0, new, number=2)
    run.vote(1, new, "a pack is missing")
    assert round.answer(new) == old
    unscript(run.repository.store)


def test_a_restore_is_reported_once_with_the_reads_of_all_ranks(run):
    old, new = run.commit(2)
    run.vote(0), run.vote(1)
    run.clock.time += 2
    run.vote(0, new, "a flipped bit", read={"store": 1000})
    run.vote(1, new, read={"store": 1000})  # reads of the version that was not restored in the end
    run.vote(0, old, read={"memory": 7, "store": 5})
    assert run.rounds.restored() == []  # not before all ranks have restored it
    run.vote(1, old, read={"store": 5})
    (told,) = run.rounds.restored()
    assert (told.version, told.step, told.ranks, told.read) == (old.id, old.step, 2, {"memory": 7, "store": 10})
    assert (told.at, told.seconds) == (run.clock.now(), 2)
    assert run.rounds.restored() == []


def ask(run: RestoringRun, rank: int, version: str, tried: Entry | None = None, damage: str = "") -> RestoreRound:
    return run.rounds.vote(RestoreVote(rank, 2, incarnation(f"a{rank}"), 1, 60.0, tried, damage, version=version))


@pytest.mark.parametrize("version", ["2", "step:1", "good"])
def test_all_ranks_restore_the_requested_version(run, version):
    """The version is leased, and no save in memory replaces it."""
    chosen = run.commit(3)[1]
    run.repository.pin(run.repository.version(2), "good")
    held = in_memory(run)
    round = run.rounds.vote(RestoreVote(0, 2, A0, 1, 60.0, version=version), held)
    assert not round.answers(None)
    assert ask(run, 1, version).answer(None) == round.answer(None) == chosen
    assert run.leases() == [(chosen.id, chosen.attempt)]
    for rank in range(2):
        ask(run, rank, version, chosen)
    assert round.answer(chosen) == chosen
    assert run.leases() == []


def test_one_step_selects_one_version_for_all_ranks(run):
    """A newer version of the step that is committed between two votes is not used."""
    (old,) = run.commit(1)
    round = ask(run, 0, "step:0")
    run.commit(1)
    assert ask(run, 1, "step:0").answer(None) == round.answer(None) == old


def test_requests_for_different_versions_fail_on_all_ranks(run):
    run.commit(2)
    rounds = [ask(run, 0, "latest"), ask(run, 1, "1")]
    for rank, round in enumerate(rounds):
        assert round.answers(None)
        with pytest.raises(StateError, match=r"different versions are asked for: 'latest' by ranks \[0\], '1' by ranks \[1\]"):
            ask(run, rank, "latest").answer(None)
    assert run.leases() == []
    assert run.vote(0, number=2).version == "latest"


def test_the_error_counts_ranks_that_request_other_versions(run):
    run.commit(2)
    for rank in range(20):
        round = run.rounds.vote(RestoreVote(rank, 20, incarnation("a"), 1, 60.0, version="1" if rank else "2"))
    with pytest.raises(StateError, match=r"'2' by ranks \[0\], '1' by ranks \[1, 2, 3, 4, 5, 6, 7, 8\] and 11 more"):
        round.answer(None)


def test_a_version_that_does_not_exist_is_an_error_for_all(run):
    run.commit(2)
    first = ask(run, 0, "best")
    assert not first.answers(None)
    for round in (first, ask(run, 1, "best")):
        assert round.answers(None)
        with pytest.raises(NotFound, match=r"there is no pin 'best' .*1 \(step 0\), 2 \(step 1\)"):
            round.answer(None)


def test_different_versions_fail_even_if_one_is_missing(run):
    run.commit(1)
    for round in [ask(run, 0, "best"), ask(run, 1, "latest")]:
        with pytest.raises(StateError, match="'best' by ranks"):
            round.answer(None)


def test_a_requested_version_of_an_empty_repository_is_missing(run):
    with pytest.raises(NotFound, match=r"there is no version 1 \(the first save creates a version\)"):
        ask(run, 0, "1").answer(None)


def test_a_damaged_requested_version_causes_no_fallback(run, caplog):
    chosen = run.commit(3)[1]
    rounds = [ask(run, rank, "2") for rank in range(2)]
    ask(run, 0, "2", chosen)
    ask(run, 1, "2", chosen, "weights.pack: the object is cut")
    for round in rounds:
        with pytest.raises(Damaged, match=r"version 2 \(step 1\): rank 1: weights.pack: the object is cut \(choose another"):
            round.answer(chosen)
    assert "falling back" not in caplog.text
    assert (run.leases(), len(run.damaged)) == ([], 1)


def test_a_requested_version_dropped_meanwhile_is_an_error(run, monkeypatch):
    """The root does not have the version any more when its lease is written."""
    run.commit(2)
    root = run.known.root()
    monkeypatch.setattr(run.known, "root", lambda: root)
    run.repository.plan_retention(Policy(keep_last=1)).execute()
    for round in [ask(run, 0, "1"), ask(run, 1, "1")]:
        with pytest.raises(NotFound, match="version 1 was dropped meanwhile"):
            round.answer(None)


def test_a_restarted_coordinator_continues_the_restore(run):
    chosen = run.commit(3)[0]
    for rank in range(2):
        ask(run, rank, "1")
    run.rounds = RestoreRounds(run.repository, run.clock, run.known)
    first = ask(run, 0, "1", chosen)
    run.clock.time += 40
    run.rounds.reading(RankReading(1, A1, 1, 60.0))
    run.clock.time += 40
    run.rounds.tick()
    assert not first.answers(chosen)
    ask(run, 1, "1", chosen)
    assert first.answer(chosen) == chosen
