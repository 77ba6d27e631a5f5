"""Digests of ranks are compared within one attempt, whatever happens to the ranks and nodes meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.begins import begin_of
from helpers.coordinated_run import CoordinatedRun, coordinated_run, part
from helpers.fake_clock import FakeClock
from helpers.processes import incarnation

from raystow.orchestrator.coordinator.attempt import Phase
from raystow.orchestrator.coordinator.replica_comparison import ReplicaComparison
from raystow.orchestrator.coordinator.restored_replicas import ReplicaRound, RestoredReplicas
from raystow.orchestrator.late_ranks import LATE
from raystow.state.chunk_info import RangeInfo
from raystow.storage.errors import RankRestarted
from raystow.workers.packing.held_digests import HeldDigests
from raystow.workers.protocol import codec
from raystow.workers.protocol.messages import (
    AwaitRanks,
    CompareReplicas,
    Incarnation,
    Message,
    RankFinished,
    ReplicaQuestions,
    ReplicasCompared,
    Ticket,
)

GROUP = 17


def held(*values: int, rank: int, writer: int = 0, group: int = GROUP) -> HeldDigests:
    """Return what a rank holds of a group of tensors ``t0000``, ``t0001`` and so on."""
    one = HeldDigests()
    infos = [RangeInfo(f"t{i:04}", "float32", (0,), (4,), writer) for i in range(len(values))]
    one.add(rank, {group: infos}, {group: np.array([values, values], "<u8").tobytes()})
    return one


def settle(comparison: ReplicaComparison, ranks: dict[int, HeldDigests], log: list[Message] | None = None) -> None:
    """Report the digests of all ranks, and answer all questions."""
    for rank, one in ranks.items():
        comparison.note(rank, one.of(rank))
    comparison.begin(0.0)
    while comparison.is_open:
        for rank, one in ranks.items():
            answers = tuple(map(one.answer, comparison.questions({rank})))
            if log is not None and answers:
                log.append(AwaitRanks(TICKET, answers=answers))
            comparison.take(answers)


TICKET = Ticket(1, "0" * 16, 0, 60.0, 1)


def test_the_majority_is_named_and_whether_it_is_stored() -> None:
    for odd, stored in ((2, "majority"), (0, "minority")):
        comparison = ReplicaComparison()
        settle(comparison, {rank: held(5, 9 if rank == odd else 7, rank=rank) for rank in range(4)})
        (difference,) = comparison.differences()
        assert (difference.name, difference.odd, difference.other_ranks, difference.stored) == ("t0001", (odd,), 3, stored)


def test_without_a_majority_the_sides_are_named() -> None:
    comparison = ReplicaComparison()
    settle(comparison, {rank: held(rank // 2, rank=rank) for rank in range(4)})
    (difference,) = comparison.differences()
    assert (difference.odd, difference.others, difference.stored) == ((2, 3), (0, 1), "unknown")
    comparison = ReplicaComparison()
    settle(comparison, {rank: held(rank, rank=rank, writer=3) for rank in range(12)})
    (difference,) = comparison.differences()
    assert difference.odd_ranks + difference.other_ranks == 8, "a few ranks answer for all"


def test_ranks_with_other_groups_are_not_compared() -> None:
    comparison = ReplicaComparison()
    settle(comparison, {0: held(1, rank=0), 1: held(2, rank=1, group=18)})
    assert comparison.differences() == ()
    assert not comparison.differs


@pytest.mark.parametrize("count", [10_000, 30_000])
def test_messages_of_ten_thousand_tensors_are_small(count: int) -> None:
    """A report takes a line for each group, and the answers to all questions less than 64 KiB."""
    values = [*range(count)]
    ranks = {rank: held(*values, rank=rank) for rank in range(2)}
    values[count - 3] += 1
    ranks[2] = held(*values, rank=2)
    for rank, one in ranks.items():
        assert len(codec.encode(RankFinished(TICKET, rank, 0, one.of(rank)))) < 200
    log = list[Message]()
    comparison = ReplicaComparison()
    settle(comparison, ranks, log)
    assert sum(len(codec.encode(message)) for message in log) / 2 < 64 << 10
    assert [one.name for one in comparison.differences()] == [f"t{count - 3:04}"]


def finish(run: CoordinatedRun, tickets: list[Ticket], ranks: list[HeldDigests]) -> None:
    for rank, (ticket, one) in enumerate(zip(tickets, ranks, strict=True)):
        run.core.finished(ticket, rank, 7 if rank == 0 else 0, one.of(rank))


def answer(run: CoordinatedRun, ticket: Ticket, one: HeldDigests) -> None:
    while (asked := run.core.questions(ticket)) is not None:
        run.core.answered(ticket, tuple(map(one.answer, asked.questions)))


def committed(run: CoordinatedRun, tickets: list[Ticket]) -> Any:
    """Commit the attempt, and return the differences of its record."""
    for ticket in tickets:
        run.core.fragment(ticket, part(ticket.node))
    record = run.core.record(run.core.attempt(tickets[0]))
    run.commit()
    assert run.phase(tickets[0]) is Phase.COMMITTED
    return record.differences


def test_a_save_waits_until_it_is_known_what_differs() -> None:
    run = coordinated_run()
    tickets, ranks = run.both(1), [held(1, 2, rank=0), held(1, 3, rank=1)]
    finish(run, tickets, ranks)
    assert run.phase(tickets[0]) is Phase.COMPARING
    for _ in range(2):  # two rounds: which ranges differ, and what these are
        for ticket, one in zip(tickets, ranks, strict=True):
            asked = run.core.questions(ticket)
            assert asked is not None
            assert run.core.questions(ticket) == asked, "the call may be repeated"
            run.core.answered(ticket, tuple(map(one.answer, asked.questions)))
    assert run.phase(tickets[0]) is Phase.SEALING
    warning = run.core.late(tickets[0], 0)
    assert warning is not None
    assert "rank 1 and rank 0 differ in t0001" in warning.text
    assert [one.name for one in committed(run, tickets)] == ["t0001"]


@pytest.mark.parametrize("last", ["none", "parts", "ranges"])
def test_nodes_that_do_not_answer_delay_a_save_for_a_while(last: str) -> None:
    """``last``: the last question that node 0 answers; node 1 answers all before that."""
    run = coordinated_run()
    tickets, ranks = run.both(1), [held(1, rank=0), held(2, rank=1)]
    finish(run, tickets, ranks)
    for node in {"none": (), "parts": (0,), "ranges": (0, 1, 0)}[last]:
        asked = run.core.questions(tickets[node])
        assert asked is not None
        run.core.answered(tickets[node], tuple(map(ranks[node].answer, asked.questions)))
    run.core.tick()
    assert run.phase(tickets[0]) is Phase.COMPARING
    run.clock.sleep(LATE + 1)
    run.core.tick()
    assert run.phase(tickets[0]) is Phase.SEALING
    warning = run.core.late(tickets[0], 0)
    assert warning is not None
    assert "their nodes have not said which" in warning.text
    assert committed(run, tickets) == ()


def test_a_rank_replaced_after_its_digests_is_no_difference() -> None:
    """The process has delivered the save and ended: its digests count. Another process joins with other bits, and the next
    attempt compares these only."""
    run = coordinated_run()
    tickets = run.both(1)
    run.core.finished(tickets[1], 1, 0, held(1, rank=1).of(1))
    run.core.rank_disconnected(1, incarnation("a1"), "it ended")
    run.core.join(1, incarnation("b1"), 2)
    run.core.finished(tickets[0], 0, 7, held(1, rank=0).of(0))
    assert committed(run, tickets) == ()
    run.core.join(0, incarnation("b0"), 2)
    again = [run.begin(rank, 1, process="b") for rank in range(2)]
    finish(run, again, [held(2, rank=0), held(2, rank=1)])
    assert committed(run, again) == ()


def test_digests_of_a_given_up_attempt_are_forgotten() -> None:
    run = coordinated_run()
    tickets = run.both(1)
    run.core.finished(tickets[0], 0, 7, held(1, rank=0).of(0))
    run.core.join(1, incarnation("b1"), 2)  # which had not delivered: the attempt is given up
    assert run.reason(tickets[0]) == "rank 1 was restarted"
    run.core.join(0, incarnation("b0"), 2)
    again = [run.begin(rank, 1, process="b") for rank in range(2)]
    finish(run, again, [held(2, rank=0), held(2, rank=1)])
    assert committed(run, again) == ()


def test_a_report_that_arrives_twice_counts_once() -> None:
    run = coordinated_run()
    tickets = run.both(1)
    for _ in range(2):
        run.core.finished(tickets[0], 0, 7, held(1, rank=0).of(0))
    run.core.finished(tickets[1], 1, 0, held(2, rank=1).of(1))
    for ticket, one in [(tickets[0], held(1, rank=0)), (tickets[1], held(2, rank=1))] * 2:
        answer(run, ticket, one)
    (difference,) = committed(run, tickets)
    assert difference.odd_ranks + difference.other_ranks == 2


def test_a_node_that_dies_while_it_is_asked_fails_the_save() -> None:
    run = coordinated_run()
    tickets = run.both(1)
    finish(run, tickets, [held(1, rank=0), held(2, rank=1)])
    run.core.nodes_alive({"node-0"})
    assert run.phase(tickets[0]) is Phase.ABORTED


def test_a_difference_fails_the_save_if_a_rank_asks() -> None:
    run = coordinated_run()
    ranks = [held(1, rank=0), held(2, rank=1)]
    tickets = [
        run.core.begin(
            begin_of(rank, 2, incarnation(f"a{rank}"), 1, f"node-{rank}", 1, 60.0, 7, 7 - 7 * rank, on_difference="raise")
        )
        for rank in range(2)
    ]
    finish(run, tickets, ranks)
    for ticket, one in [*zip(tickets, ranks, strict=True)] * 2:
        answer(run, ticket, one)
    assert run.phase(tickets[0]) is Phase.ABORTED
    assert run.reason(tickets[0]).startswith("rank 1 and rank 0 differ in t0000")


def test_ranks_compare_after_a_restore() -> None:
    restored = RestoredReplicas(FakeClock())
    who = [incarnation(f"a{rank}") for rank in range(2)]

    def report(rank: int, number: int, value: int, process: Incarnation | None = None) -> ReplicaRound:
        digests = held(value, rank=rank).of(rank)
        return restored.take(CompareReplicas(rank, 2, process or who[rank], number, 60.0, digests))

    first = report(0, 1, 5)
    assert first.answer(0) is None
    assert report(0, 1, 5) is first, "the call is repeated"
    assert report(1, 1, 5) is first
    assert first.answer(0) == first.answer(1) == ReplicasCompared(())
    second = report(1, 2, 6)
    assert report(0, 2, 5) is second is not first
    assert isinstance(second.answer(0), ReplicaQuestions)
    third = report(0, 3, 5)
    fourth = report(1, 1, 5, incarnation("b1"))
    assert fourth is third
    report(0, 1, 5, incarnation("b0"))
    with pytest.raises(RankRestarted, match="rank 0 was restarted"):
        third.answer(1)
