"""``due`` gives every rank the same answer at each step, and saves are due at the configured interval."""

from __future__ import annotations

import itertools
import logging

import pytest
from fake_clock import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.orchestrator.client.due_steps import DueSteps
from raystow.orchestrator.coordinator.save_schedule import SaveSchedule
from raystow.storage.errors import ClusterError
from raystow.workers.protocol.messages import NextSave

RANKS = 3
LOGGER = logging.getLogger("raystow")


class ScheduledRun:
    """Ranks that share one save schedule."""

    def __init__(self, interval: float) -> None:
        self.clock = FakeClock()
        self.schedule, self.interval = SaveSchedule(self.clock), interval
        self.asked = 0
        self.ranks = [DueSteps(self.ask, LOGGER, start=lambda run: run()) for _ in range(RANKS)]

    def ask(self, first: int) -> NextSave:
        self.asked += 1
        return self.schedule.next(first, self.interval)


@settings(max_examples=40)
@given(st.data(), st.floats(0.1, 100))
def test_all_ranks_get_the_same_answers(data: st.DataObject, interval: float) -> None:
    """Ranks may be a few steps apart, call ``due`` at some steps only, or return to an earlier step together."""
    run, every = ScheduledRun(interval), data.draw(st.integers(1, 3), label="due is called every so many steps")
    for start in (0, data.draw(st.integers(0, 30), label="restored step")):
        steps, answers = range(start, start + 20, every), [list[bool]() for _ in range(RANKS)]
        while any(len(told) < len(steps) for told in answers):
            slowest = min(map(len, answers))
            ready = [rank for rank in range(RANKS) if len(answers[rank]) < min(len(steps), slowest + 2)]
            rank = data.draw(st.sampled_from(ready))
            answers[rank].append(run.ranks[rank].due(steps[len(answers[rank])]))
            run.clock.sleep(data.draw(st.sampled_from([0.0, 0.1, 1.0])))
        assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("per_step", [0.01, 1.0, 7.0])
def test_saves_are_due_at_the_interval(per_step: float) -> None:
    run, saved = ScheduledRun(100.0), [0.0]
    for step in range(int(1000 / per_step)):
        if run.ranks[0].due(step):
            saved.append(run.clock.time)
        run.clock.sleep(per_step)
    gaps = [after - before for before, after in itertools.pairwise(saved)]
    assert len(gaps) >= 8
    assert all(abs(gap - 100) <= 2 * per_step for gap in gaps)
    assert run.asked <= 30 * len(gaps)  # the number of requests does not depend on the number of steps


def test_a_slower_step_moves_the_save_to_an_earlier_one() -> None:
    run, due = ScheduledRun(100.0), list[tuple[int, float]]()
    for step in range(200):
        if run.ranks[0].due(step):
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
            answers[rank] += [step] if due.due(step) else []
        run.clock.sleep(1.0)
    late = [[step for step in told if step > 100] for told in answers]
    assert late[0] == late[1] == late[2] != []


def test_no_step_is_due_while_the_coordinator_is_unreachable(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[NextSave | ClusterError] = [ClusterError("no head node"), ClusterError("no head node"), NextSave(7, save=True)]

    def ask(first: int) -> NextSave:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, ClusterError):
            raise answer
        return answer

    due = DueSteps(ask, LOGGER, start=lambda run: run())
    with caplog.at_level(logging.WARNING):
        assert [due.due(step) for step in range(5, 8)] == [False, False, True]
    assert caplog.messages == ["no step is due until the coordinator says when to save: no head node"]


def test_a_late_answer_is_awaited_once(caplog: pytest.LogCaptureFixture) -> None:
    later = list[object]()
    due = DueSteps(lambda first: NextSave(3, save=True), LOGGER, patience=0, start=later.append)
    with caplog.at_level(logging.WARNING):
        assert [due.due(step) for step in (1, 2)] == [False, False]
        later[0]()  # type: ignore[operator]
        assert due.due(3)
    assert len(caplog.messages) == 1
