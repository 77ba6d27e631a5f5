"""The state machine of the coordinator, driven step by step: membership of attempts and the events that end an attempt."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from helpers.begins import begin_of
from helpers.coordinated_run import CoordinatedRun, coordinated_run, part
from helpers.processes import A0, A1, B0, B1, incarnation

from raystow.orchestrator.coordinator import attempts
from raystow.orchestrator.coordinator.attempt import Phase
from raystow.orchestrator.coordinator.attempts import Coordinator
from raystow.storage.errors import Fenced, SaveFailed, StoreUnavailable
from raystow.storage.format.version_record import RestoreInfo
from raystow.workers.protocol.messages import JournalVote, ReplicaAnswer, RestoreVote, Ticket


@pytest.fixture
def run() -> CoordinatedRun:
    return coordinated_run()


def test_two_ranks_make_a_version(run: CoordinatedRun) -> None:
    tickets = [run.begin(0), run.begin(1)]
    assert tickets[0].attempt == tickets[1].attempt
    assert [ticket.node for ticket in tickets] == [0, 1]
    run.seal(tickets)
    assert run.phase(tickets[0]) is Phase.READY
    run.commit()
    assert run.phase(tickets[0]) is Phase.COMMITTED
    assert [version.id for version in run.committer.catalog.versions()] == [1]


def test_versions_are_committed_in_the_order_of_saves(run: CoordinatedRun) -> None:
    first, second = [run.begin(0, 1), run.begin(1, 1)], [run.begin(0, 2, save=2), run.begin(1, 2, save=2)]
    run.seal(second)
    assert run.core.next_commit() is None
    run.core.failed(first[0], "a disk is full")
    run.commit()
    assert [version.step for version in run.committer.catalog.versions()] == [2]


def test_two_saves_of_one_step_are_separate_attempts(run: CoordinatedRun) -> None:
    first, second = run.begin(0, save=1), run.begin(0, save=2)
    assert first.attempt != second.attempt
    assert run.begin(1, save=1).attempt == first.attempt
    assert run.begin(1, save=2).attempt == second.attempt


def test_a_flood_of_saves_is_refused(run: CoordinatedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call looks at all open saves: 5,000 of them took the coordinator 42 s. Those that are open go on."""
    monkeypatch.setattr(attempts, "MOST_OPEN", 3)
    first = run.begin(0)
    for save in (2, 3):
        run.begin(0, save, save=save)
    with pytest.raises(SaveFailed, match="3 saves are open: some ranks begin saves that others do not"):
        run.begin(0, 4, save=4)
    run.seal([first, run.begin(1)])
    run.commit()
    assert run.begin(0, 4, save=4).id == 4


def test_repeated_calls_have_no_further_effect(run: CoordinatedRun) -> None:
    tickets = [run.begin(0), run.begin(1)]
    assert run.begin(0) == tickets[0]
    run.core.join(0, A0, 2)
    run.seal(tickets)
    run.core.fragment(tickets[0], part(0))
    run.commit()
    assert len(run.committer.catalog.versions()) == 1


def test_a_fragment_repeated_after_the_commit_is_no_error(run: CoordinatedRun) -> None:
    tickets = [run.begin(0), run.begin(1)]
    run.seal(tickets)
    run.commit()
    run.core.fragment(tickets[0], part(0))
    assert run.phase(tickets[0]) is Phase.COMMITTED


def test_changes_counts_phase_transitions_only(run: CoordinatedRun) -> None:
    tickets = [run.begin(0), run.begin(1)]
    run.core.finished(tickets[0], 0, 7)
    assert run.core.changes == 0
    run.core.finished(tickets[1], 1, 0)
    assert (run.core.changes, run.phase(tickets[0])) == (1, Phase.SEALING)
    run.core.fragment(tickets[0], part(0))
    assert run.core.changes == 1


def test_a_restarted_rank_ends_attempts_that_wait_for_it(run: CoordinatedRun) -> None:
    ticket = run.begin(0)
    run.core.join(1, B1)
    assert (run.phase(ticket), run.reason(ticket)) == (Phase.ABORTED, "rank 1 was restarted")
    with pytest.raises(Fenced, match="b1, job 1 has taken up this rank after a1, job 1"):
        run.begin(1, process="a")


def test_parts_that_dead_ranks_delivered_become_a_version(run: CoordinatedRun) -> None:
    """Their node workers have all of it. They may be restarted, as more ranks, before it is coded."""
    tickets = [run.begin(0)]
    run.core.rank_disconnected(0, A0, "it was killed")
    tickets += [run.begin(1)]
    run.core.rank_disconnected(1, A1, "it was killed")
    for rank in range(3):
        run.core.join(rank, incarnation(f"b{rank}"), 3)
    run.seal(tickets)
    run.commit()
    assert run.phase(tickets[0]) is Phase.COMMITTED


def test_a_restarted_rank_ends_attempts_that_stay_incomplete(run: CoordinatedRun) -> None:
    """Rank 1 has delivered its part, but rank 0 is replaced while its own part still comes."""
    old = [run.begin(0), run.begin(1)]
    run.core.rank_disconnected(1, A1, "it was killed")
    run.core.join(1, B1, 2)
    assert run.phase(old[0]) is Phase.GATHERING
    run.core.join(0, B0, 2)
    assert (run.phase(old[0]), run.reason(old[0])) == (Phase.ABORTED, "rank 0 was restarted")


def test_a_restarted_rank_does_not_wait_for_its_predecessor(run: CoordinatedRun) -> None:
    """Versions have the order of saves: one that stays incomplete, since a node worker died too, would hold up the next."""
    old = run.begin(0)
    run.core.rank_disconnected(0, A0, "it was killed")
    run.core.join(0, B0, 2)
    new = run.begin(0, process="b")  # also the first save of rank 0, of the same step
    assert (run.phase(old), run.reason(old)) == (Phase.ABORTED, "rank 0 was restarted")
    assert run.begin(1).attempt == new.attempt != old.attempt


def test_a_process_that_connects_again_completes_its_saves(run: CoordinatedRun) -> None:
    first = run.begin(0, 10, save=1)
    run.core.rank_disconnected(0, A0, "it connects again")
    run.begin(0, 20, save=2)
    assert run.begin(1, 10, save=1).attempt == first.attempt


def test_the_error_names_both_processes_of_one_rank(run: CoordinatedRun) -> None:
    run.core.join(0, incarnation("process 17 on first-host"))
    run.core.join(0, incarnation("process 4 on other-host", number=2))
    text = "rank 0 of memory://.*: process 4 on other-host, .* has taken up this rank after process 17 on first-host, .*on_fenced"
    with pytest.raises(Fenced, match=text):
        run.core.begin(begin_of(0, 2, incarnation("process 17 on first-host"), 1, "node-0", 1, 60.0, 7, 7))


def test_different_steps_of_one_save_abort_immediately(run: CoordinatedRun) -> None:
    run.core.join(0, A0, 2)
    run.core.join(1, A1, 2)
    ten, twenty = run.begin(0, 10, save=1), run.begin(1, 20, save=1)
    text = "rank 1 saves step 20 where rank 0 saved step 10: all ranks must save the same steps in the same order"
    assert (run.phase(ten), run.reason(ten)) == (Phase.ABORTED, text)
    assert run.begin(0, 20, save=2).attempt == twenty.attempt  # the step that both ranks save becomes a version


def test_an_attempt_waits_for_a_slower_rank(run: CoordinatedRun) -> None:
    """One rank begins its second save before the other rank begins its first; both save the same steps."""
    run.core.join(0, A0, 2)
    run.core.join(1, A1, 2)
    first, second = run.begin(0, 10, save=1), run.begin(0, 20, save=2)
    assert run.begin(1, 10, save=1).attempt == first.attempt
    assert run.begin(1, 20, save=2).attempt == second.attempt


def test_a_repeated_call_of_a_slow_rank_ends_no_later_attempt(run: CoordinatedRun) -> None:
    run.core.join(0, A0, 2)
    run.core.join(1, A1, 2)
    later = run.begin(0, 20, save=2)
    run.begin(1, 10, save=1)
    assert run.phase(later) is Phase.GATHERING


def test_a_new_generation_may_save_while_its_ranks_still_join(run: CoordinatedRun) -> None:
    old = run.begin(0)
    run.core.join(1, B1)
    new = run.begin(1, process="b")
    run.core.join(0, B0)
    assert run.phase(old) is Phase.ABORTED
    assert run.phase(new) is Phase.GATHERING
    assert run.begin(0, process="b").attempt == new.attempt


def test_a_larger_world_may_save_while_its_ranks_still_join(run: CoordinatedRun) -> None:
    old = run.begin(0)
    run.core.join(2, incarnation("b2"), 3)  # the new world size shows that all ranks restart, although this rank is unknown
    new = run.begin(2, process="b", world=3)
    assert run.phase(old) is Phase.ABORTED
    for rank in range(2):
        run.core.join(rank, incarnation(f"b{rank}"), 3)
        assert run.begin(rank, process="b", world=3).attempt == new.attempt
    assert run.phase(new) is Phase.GATHERING


def test_a_rank_restarted_alone_saves_with_the_others(run: CoordinatedRun) -> None:
    run.core.join(1, B1)
    assert run.begin(0).attempt == run.begin(1, process="b").attempt


def test_a_process_of_an_old_generation_joins_no_new_attempt(run: CoordinatedRun) -> None:
    run.core.join(1, B1)
    zombie = run.begin(0, process="a")
    mixed = run.begin(1, process="b")
    assert zombie.attempt == mixed.attempt  # rank 0 may still be running: no call has shown that it was restarted
    run.core.join(0, B0)
    assert run.phase(mixed) is Phase.ABORTED


def test_delivered_shards_survive_the_end_of_the_process(run: CoordinatedRun) -> None:
    ticket = run.begin(1)
    run.core.rank_disconnected(1, A1, "rank 1 went away")
    assert run.phase(ticket) is Phase.GATHERING
    run.seal([run.begin(0), ticket])
    run.commit()
    assert run.phase(ticket) is Phase.COMMITTED


def test_an_attempt_ends_if_a_rank_leaves_before_its_save(run: CoordinatedRun) -> None:
    ticket = run.begin(0)
    run.core.rank_disconnected(1, incarnation("z1"), "its previous process went away")
    assert run.phase(ticket) is Phase.GATHERING
    run.core.rank_disconnected(1, A1, "rank 1 went away")
    assert run.reason(ticket) == "rank 1 went away"


def test_timeout_errors_name_the_missing_ranks_and_nodes(run: CoordinatedRun) -> None:
    sealing, ticket = [run.begin(0, 1), run.begin(1, 1)], run.begin(0, 2, save=2)
    for rank in range(2):
        run.core.finished(sealing[rank], rank, 7 if rank == 0 else 0)
    run.core.fragment(sealing[0], part(0))
    run.clock.time += 59
    run.core.tick()
    assert run.phase(ticket) is Phase.GATHERING
    run.clock.time += 2
    run.core.tick()
    assert run.reason(ticket) == "ranks [0, 1] had not delivered their shards after 60 s"
    assert run.reason(sealing[0]) == "nodes ['node-1'] had not stored their shards after 60 s"
    assert {id for id, _ in run.core.abandoned()} == {1, 2}
    assert run.core.abandoned() == []


def test_a_dead_node_ends_the_attempts_with_its_shards(run: CoordinatedRun) -> None:
    tickets = [run.begin(0), run.begin(1)]
    run.core.nodes_alive({"node-0", "node-1"})
    assert run.phase(tickets[0]) is Phase.GATHERING
    run.core.nodes_alive(set())
    assert run.reason(tickets[0]) == "node node-0 died with the shards of ranks [0]"
    assert run.core.aborted_in_a_row == 1


def test_a_node_whose_part_is_durable_may_fail(run: CoordinatedRun) -> None:
    tickets = run.both(1)
    for rank, ticket in enumerate(tickets):
        run.core.finished(ticket, rank, 7 if rank == 0 else 0)
    for node, ticket in enumerate(tickets):
        run.core.fragment(ticket, part(node))
        run.core.nodes_alive({"node-1"})
        run.core.failed(ticket, "it is shut down")
    run.commit()
    assert run.phase(tickets[0]) is Phase.COMMITTED
    run.core.failed(msgspec.structs.replace(tickets[0], attempt="of an earlier coordinator"), "it is shut down")


def test_another_world_size_ends_the_old_attempts(run: CoordinatedRun) -> None:
    ticket = run.begin(0, world=2)
    run.begin(2, 2, process="b", world=3)
    assert "world size changed from 2 to 3" in run.reason(ticket)


@pytest.mark.parametrize(
    ("replicated", "covered", "says"), [(8, 7, "ranks [1] hold other plain tensors"), (7, 6, "do not add up")]
)
def test_incomplete_shards_make_no_version(run: CoordinatedRun, replicated: int, covered: int, says: str) -> None:
    tickets = [run.begin(0), run.begin(1, replicated=replicated)]
    run.core.finished(tickets[0], 0, covered)
    run.core.finished(tickets[1], 1, 0)
    for ticket in tickets:  # the nodes do not have what ranks store any more
        if (asked := run.core.questions(ticket)) is not None:
            run.core.answered(ticket, [ReplicaAnswer(one, 0) for one in asked.questions])
    assert says in run.reason(tickets[0])
    assert run.phase(tickets[0]) is Phase.ABORTED


def test_the_first_plain_tensors_that_differ_are_named(run: CoordinatedRun) -> None:
    """They are also named in a later save, in which the ranks do not send their tensors again."""
    alike, rest = ("w float32 [3, 4]", "b float32 [4]"), ("w float32 [3, 4]", "b float32 [5]", "more int8 [1]")
    for step in (1, 2):
        plain = {0: alike, 1: rest} if step == 1 else {0: (), 1: ()}
        tickets = [run.begin(rank, step, save=step, replicated=7 + rank, plain_tensors=plain[rank]) for rank in range(2)]
        for rank, ticket in enumerate(tickets):
            run.core.finished(ticket, rank, 7)
        assert "(rank 1 has b float32 [5], more int8 [1]; rank 0 has b float32 [4])" in run.reason(tickets[0])


def test_an_unanswered_commit_keeps_its_objects(run: CoordinatedRun) -> None:
    """A newer epoch ends all attempts."""
    run.seal([run.begin(0), run.begin(1)])
    attempt = run.core.next_commit()
    assert attempt is not None
    run.core.settled(attempt, StoreUnavailable("time-out"))
    assert run.core.abandoned() == []  # it may have become a version
    again = [run.begin(0, 3, save=3), run.begin(1, 3, save=3)]
    waiting = run.begin(0, 4, save=4)
    run.seal(again)
    run.core.settled(run.core.attempt(again[0]), Fenced("epoch 9 has replaced epoch 1"))
    assert "epoch 9" in run.reason(waiting)


def test_an_unknown_attempt_reports_a_restarted_coordinator(run: CoordinatedRun) -> None:
    with pytest.raises(SaveFailed, match="the coordinator was restarted"):
        run.core.finished(Ticket(9, "f" * 16, 0, 60.0, 1), 0, 0)


def restarted(run: CoordinatedRun) -> CoordinatedRun:
    return CoordinatedRun(Coordinator(run.committer, run.clock, writer={}), run.committer, run.clock)


@pytest.mark.parametrize("message", ["save", "failure", "vote"])
def test_a_late_message_after_a_restart_takes_no_rank(run: CoordinatedRun, message: str) -> None:
    """A process that was replaced before the coordinator was restarted is the first to call the new one."""
    run.core.join(0, B0, 2)
    fresh = restarted(run)
    if message == "save":
        fresh.begin(0, 1, process="a")
    elif message == "failure":
        fresh.core.save_failed(0, A0, 1, 1, "it was frozen")
    else:
        fresh.core.check_member(RestoreVote(0, 2, A0, 1, 60.0))
    ticket = fresh.begin(0, 2, process="b", save=2)
    assert fresh.phase(ticket) is Phase.GATHERING
    with pytest.raises(Fenced, match="b0, job 1 has taken up this rank"):
        fresh.begin(0, 1, process="a")
    fresh.core.save_failed(0, A0, 2, 2, "it was frozen")
    assert fresh.begin(1, 2, save=2).attempt == ticket.attempt
    assert fresh.phase(ticket) is Phase.GATHERING


def test_a_takeover_lasts_after_a_restart(run: CoordinatedRun) -> None:
    fresh = restarted(run)
    fresh.begin(0, process="b")
    fresh.core.begin(begin_of(0, 2, A0, 1, "node-0", 2, 60.0, 7, 7, on_fenced="takeover"))
    with pytest.raises(Fenced):
        fresh.begin(0, 3, process="b", save=2)


def take_over(run: CoordinatedRun, rank: int) -> Ticket:
    return run.begin(rank, on_fenced="takeover")


def test_a_takeover_mixes_no_ranks_of_two_runs(run: CoordinatedRun) -> None:
    """Both runs save the same step, and the second rank of the run that takes over is late."""
    for rank in range(2):
        run.core.join(rank, incarnation(f"b{rank}"), 2)
    old = run.begin(1, process="b")
    first = take_over(run, 0)
    assert run.phase(old) is Phase.ABORTED
    for message in (begin_of(1, 2, B1, 2, "node-1", 1, 60.0, 7, 0).request, RestoreVote(1, 2, B1, 1, 60.0)):
        with pytest.raises(Fenced, match="has taken over"):
            run.core.check_member(message)
    second = take_over(run, 1)
    run.seal([first, second])
    run.commit()
    assert run.phase(first) is Phase.COMMITTED


def test_a_takeover_from_one_rank_keeps_the_others(run: CoordinatedRun) -> None:
    run.core.join(0, B0, 2)
    first, second = take_over(run, 0), take_over(run, 1)
    assert first.attempt == second.attempt
    run.core.check_member(RestoreVote(1, 2, A1, 1, 60.0))


@pytest.mark.parametrize("vote", [RestoreVote(0, 2, A0, 1, 60.0), JournalVote(0, 2, A0, 1, 60.0, 0)])
def test_a_replaced_process_has_no_vote(run: CoordinatedRun, vote: RestoreVote | JournalVote) -> None:
    run.core.check_member(vote)
    run.core.join(0, B0, 2)
    with pytest.raises(Fenced, match=r"rank 0 of .*: b0, job 1 has taken up this rank"):
        run.core.check_member(vote)


@pytest.mark.parametrize("order", ["known", "new", "old"])
def test_a_smaller_run_fences_ranks_that_it_lacks(run: CoordinatedRun, order: str) -> None:
    """Such a process would end the restore and the save of the run that has replaced its own, also if it is the first to call a
    restarted coordinator."""
    vote = RestoreVote(1, 2, A1, 1, 60.0)
    if order == "known":
        run.core.check_member(vote)
    else:
        run = restarted(run)
    if order == "old":
        run.core.check_member(vote)
    run.core.join(0, B0, 1)
    ticket = run.begin(0, process="b", world=1)
    with pytest.raises(Fenced, match="has begun a run of world size 1 after"):
        run.core.check_member(vote)
    with pytest.raises(Fenced):
        run.begin(1, 2)
    assert run.phase(ticket) is Phase.GATHERING


def test_a_save_that_failed_on_one_rank_ends_its_attempt(run: CoordinatedRun) -> None:
    waiting = run.begin(0, 5)
    run.core.save_failed(1, A1, 1, 5, "rank 1: its node worker died")
    assert run.reason(waiting) == "rank 1: its node worker died"


def test_a_save_that_has_failed_starts_no_attempt(run: CoordinatedRun) -> None:
    run.core.save_failed(1, A1, 1, 5, "rank 1: its node worker died")
    late = run.begin(0, 5)
    assert run.phase(late) is Phase.ABORTED


def test_a_step_can_be_saved_again_after_a_rank_has_failed_to(run: CoordinatedRun) -> None:
    run.core.save_failed(1, A1, 1, 5, "rank 1: its node worker died")
    run.begin(0, 5)
    again = [run.begin(0, 5, save=2), run.begin(1, 5, save=2)]
    run.seal(again)
    run.commit()
    assert run.phase(again[0]) is Phase.COMMITTED


def test_one_rank_logs_a_failed_save_for_all(run: CoordinatedRun) -> None:
    report = (5, "rank 1: its node worker died")
    assert run.core.save_failed(1, A1, 1, *report)
    assert not run.core.save_failed(0, A0, 1, *report)
    assert run.core.save_failed(1, A1, 1, *report)  # repeated, since the answer was lost
    assert run.core.save_failed(0, A0, 2, *report)  # another save of the same step
    run.core.join(1, B1)
    assert run.core.save_failed(1, A1, 1, *report)  # a replaced process reports itself


def test_a_failed_save_of_a_replaced_process_is_ignored(run: CoordinatedRun) -> None:
    run.core.save_failed(1, A1, 1, 5, "rank 1: its node worker died")
    run.core.join(1, B1)
    run.core.save_failed(1, A1, 1, 5, "rank 1: its node worker died")
    assert run.phase(run.begin(0, 5)) is Phase.GATHERING


def test_a_failed_save_ends_only_its_own_attempt(run: CoordinatedRun) -> None:
    first, second = run.begin(1, 5), run.begin(1, 6, save=2)
    run.core.save_failed(1, A1, 1, 5, "rank 1: its node worker died")
    assert (run.phase(first), run.phase(second)) == (Phase.ABORTED, Phase.GATHERING)


def test_a_restarted_coordinator_accepts_a_failed_save(run: CoordinatedRun) -> None:
    fresh = restarted(run)
    fresh.core.save_failed(1, A1, 1, 5, "the coordinator was restarted during this save")
    assert fresh.phase(fresh.begin(0, 5)) is Phase.ABORTED


@pytest.mark.parametrize(
    "change",
    [
        {"node": 1},
        {"digest": "AB" * 32},
        {"size": -1},
        {"size": 1 << 40},
        {"raw": -1},
        {"stored": 1 << 63},
        {"ranks": (-1,)},
        {"stall": float("nan")},
        {"bases": (2, 1)},
        {"packs": None},
        {"packs": -1},
        {"packs": 1},
    ],
)
@pytest.mark.parametrize("durable", [False, True])
def test_an_invalid_part_aborts_its_save(run: CoordinatedRun, change: dict[str, object], *, durable: bool) -> None:
    tickets = [run.begin(0), run.begin(1)]
    for rank, ticket in enumerate(tickets):
        run.core.finished(ticket, rank, 7 if rank == 0 else 0)
    report = run.core.fragment if durable else run.core.staged
    with pytest.raises(SaveFailed, match="node 0 reported an invalid part"):
        report(tickets[0], replace(part(0), **change))
    assert run.phase(tickets[0]) is Phase.ABORTED
    run.seal(run.both(2))
    run.commit()
    assert [version.step for version in run.committer.catalog.versions()] == [2]


def test_invalid_restore_reports_are_dropped(run: CoordinatedRun) -> None:
    good = RestoreInfo(1, 10, 0.0, 2, 1.5, {"store": 5})
    run.core.restored([replace(good, read={"store": -1}), good, replace(good, seconds=float("inf"))])
    tickets = run.both(1)
    for rank, ticket in enumerate(tickets):
        run.core.finished(ticket, rank, 7 if rank == 0 else 0)
    for report in (run.core.staged, run.core.fragment):
        for ticket in tickets:
            report(ticket, part(ticket.node))
    run.commit()
    assert run.committer.catalog.latest().record.restores == (good,)
