"""``due`` gives every rank the same answer at each step; saves are due at the configured interval, on a notice and on request."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from functools import partial

import pytest
from helpers.fake_clock import FakeClock
from helpers.processes import incarnation
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.orchestrator.client.due_steps import DueSteps
from raystow.orchestrator.client.options import Interval
from raystow.orchestrator.coordinator.save_schedule import SaveSchedule
from raystow.storage.errors import ClusterError
from raystow.workers.protocol.messages import AskNextSave, NextSave

RANKS = 3
BY_TIME = Interval()
LOGGER = logging.getLogger("raystow")


class ScheduledRun:
    """Ranks that share one save schedule, each on its own node."""

    def __init__(self, interval: float) -> None:
        self.clock = FakeClock()
        self.schedule, self.interval = SaveSchedule(self.clock), interval
        self.asked = 0
        self.ranks = [DueSteps(partial(self.ask, rank), LOGGER, start=lambda run: run()) for rank in range(RANKS)]

    def ask(self, rank: int, first: int, _: Interval, requested: bool) -> NextSave:
        self.asked += 1
        question = AskNextSave(rank, incarnation(""), RANKS, first, node=f"node-{rank}", requested=requested)
        return self.schedule.next(question, self.interval)

    def step(self, number: int, seconds: float = 0.0) -> bool:
        """Take a step on all ranks; return whether it is due."""
        self.clock.sleep(seconds)
        (due,) = {rank.due(number, BY_TIME) for rank in self.ranks}
        return due


@settings(max_examples=40)
@given(st.data(), st.floats(0.1, 100))
def test_all_ranks_get_the_same_answers(data: st.DataObject, interval: float) -> None:
    """Ranks may be a few steps apart, call ``due`` at some steps only, or return to an earlier step together."""
    run, every = ScheduledRun(interval), data.draw(st.integers(1, 3), label="due is called every so many steps")
    for start in (0, data.draw(st.integers(0, 30), label="restored step")):
        steps, answers = range(start, start + 20, every), [list[bool]() for _ in range(RANKS)]
        while any(len(due_steps) < len(steps) for due_steps in answers):
            slowest = min(map(len, answers))
            ready = [rank for rank in range(RANKS) if len(answers[rank]) < min(len(steps), slowest + 2)]
            rank = data.draw(st.sampled_from(ready))
            answers[rank].append(run.ranks[rank].due(steps[len(answers[rank])], BY_TIME))
            run.clock.sleep(data.draw(st.sampled_from([0.0, 0.1, 1.0])))
            if data.draw(st.integers(0, 9)) == 0:
                run.ranks[data.draw(st.integers(0, RANKS - 1))].request()
            if data.draw(st.integers(0, 9)) == 0:
                run.schedule.leaving = {*run.schedule.leaving, f"node-{data.draw(st.integers(0, RANKS))}"}
        assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("per_step", [0.01, 1.0, 7.0])
def test_saves_are_due_at_the_interval(per_step: float) -> None:
    run, saved = ScheduledRun(100.0), [0.0]
    for step in range(int(1000 / per_step)):
        if run.ranks[0].due(step, BY_TIME):
            saved.append(run.clock.time)
        run.clock.sleep(per_step)
    gaps = [after - before for before, after in itertools.pairwise(saved)]
    assert len(gaps) >= 8
    assert all(abs(gap - 100) <= 2 * per_step for gap in gaps)
    assert run.asked <= 130 * len(gaps)  # one a second: the number of requests does not depend on the number of steps


def test_a_slower_step_moves_the_save_to_an_earlier_one() -> None:
    run, due = ScheduledRun(100.0), list[tuple[int, float]]()
    for step in range(200):
        if run.ranks[0].due(step, BY_TIME):
            due.append((step, run.clock.time))
        run.clock.sleep(1.0 if step < 40 else 4.0)
    assert due[0][0] < 60
    assert abs(due[0][1] - 100) <= 4


def test_ranks_agree_again_after_a_restart_of_the_coordinator() -> None:
    run = ScheduledRun(20.0)
    answers = [list[int]() for _ in range(RANKS)]
    for step in range(200):
        for rank, due in enumerate(run.ranks):
            if (step, rank) == (53, 1):
                run.schedule = SaveSchedule(run.clock)
            answers[rank] += [step] if due.due(step, BY_TIME) else []
        run.clock.sleep(1.0)
    late = [[step for step in due_steps if step > 100] for due_steps in answers]
    assert late[0] == late[1] == late[2] != []


def test_no_step_is_due_while_the_coordinator_is_unreachable(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[NextSave | ClusterError] = [ClusterError("no head node"), ClusterError("no head node"), NextSave(7, save=True)]

    def ask(first: int, *_: object) -> NextSave:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, ClusterError):
            raise answer
        return answer

    due = DueSteps(ask, LOGGER, start=lambda run: run())
    with caplog.at_level(logging.WARNING):
        assert [due.due(step, BY_TIME) for step in range(5, 8)] == [False, False, True]
    assert caplog.messages == ["steps are due only by Interval.steps until the coordinator says when to save: no head node"]


def test_a_late_answer_is_awaited_once(caplog: pytest.LogCaptureFixture) -> None:
    later = list[object]()
    due = DueSteps(lambda *_: NextSave(3, save=True), LOGGER, patience=0, start=later.append)
    with caplog.at_level(logging.WARNING):
        assert [due.due(step, BY_TIME) for step in (1, 2)] == [False, False]
        later[0]()  # type: ignore[operator]
        assert due.due(3, BY_TIME)
    assert len(caplog.messages) == 1


def notice(run: ScheduledRun, rank: int) -> None:
    run.schedule.leaving = {*run.schedule.leaving, f"node-{rank}"}


def request(run: ScheduledRun, rank: int) -> None:
    run.ranks[rank].request()


@pytest.mark.parametrize("rank", [0, RANKS - 1])
@pytest.mark.parametrize("happens", [notice, request])
@pytest.mark.parametrize(("per_step", "most"), [(0.001, 2000), (0.4, 5), (30.0, 2)])
def test_a_notice_and_a_request_are_met_once(happens: Callable[..., None], rank: int, per_step: float, most: int) -> None:
    """By all ranks, within two seconds, or two steps if these are longer."""
    run = ScheduledRun(math.inf)
    assert not any(run.step(step, per_step) for step in range(6000))
    happens(run, rank)
    due = [step for step in range(6000, 12000) if run.step(step, per_step)]
    assert len(due) == 1
    assert due[0] - 6000 <= most


def test_a_notice_before_the_first_step_is_met() -> None:
    """Also one of a node whose rank asks after the others; not one of a node without ranks of this size of the run."""
    run = ScheduledRun(math.inf)
    notice(run, 1)
    notice(run, RANKS)
    assert [run.step(step, 1.0) for step in range(4)] == [False, False, True, False]


def test_a_notice_that_follows_another_is_met() -> None:
    run = ScheduledRun(math.inf)
    found = list[bool]()
    for step in range(12):
        if step % 4 == 0:
            notice(run, step // 4)
        found.append(run.step(step, 3.0))
    assert found.count(True) == RANKS


def test_many_ranks_ask_more_rarely() -> None:
    clock = FakeClock()
    schedule, first, asked = SaveSchedule(clock), 0, 0
    for step in range(100_000):
        if step >= first:
            first, asked = schedule.next(AskNextSave(0, incarnation(""), 10_000, step), math.inf).step + 1, asked + 1
        clock.sleep(0.01)
    assert asked < 100, "in 1,000 s"
