"""The state of a save in progress, as its caller sees it."""

from __future__ import annotations

import threading

import pytest
import torch
from accelerate import Accelerator
from helpers.polling import wait_until
from helpers.saves import Cluster, save, saves, subscribers

from raystow.orchestrator.client.pending import Pending
from raystow.orchestrator.client.save_outcome import SaveOutcome
from raystow.storage.errors import OutcomeUnknown, SaveFailed
from raystow.storage.runtime.clock import SYSTEM
from raystow.workers.staging.progress import SaveProgress


def test_the_stall_grows_only_while_the_caller_waits() -> None:
    outcome = save()
    pending = Pending(outcome)
    assert pending.stall == 0
    with outcome.progress.blocking(SYSTEM.monotonic() - 5):
        assert pending.stall >= 5  # the value during the wait
    first = pending.stall
    assert 5 <= first == pending.stall
    with outcome.progress.blocking(SYSTEM.monotonic() - 7):
        assert pending.stall >= first + 7
    assert first + 7 <= pending.stall


def test_waiting_raises_the_priority_and_polling_does_not() -> None:
    outcome = save()
    assert not Pending(outcome).staged(0)
    assert not outcome.progress.urgent.is_set()
    assert not Pending(outcome).staged(1e-3)
    assert outcome.progress.urgent.is_set()


def test_a_fence_waits_for_the_reading_only() -> None:
    """The node worker's answer comes later."""
    progress, late, in_flight = SaveProgress(1), list[str](), saves(600.0)
    pending = Pending(outcome := in_flight.begin(progress))
    progress.read.set()
    assert not in_flight.wait_until_read(late.append)
    assert not pending.staged(0)
    outcome.report(SaveFailed("a disk is full"))
    assert pending.staged()
    assert late == []


def test_a_fence_gives_up_reading_after_the_timeout() -> None:
    given_up, in_flight = list[str](), saves(0.01)
    outcome = in_flight.begin(SaveProgress(1))
    assert in_flight.wait_until_read(given_up.append)
    assert given_up == ["nothing staged within 0 s: the node worker accepts no data"]
    outcome.report(SaveFailed("the node worker accepts no data"))
    assert not in_flight.wait_until_read(given_up.append)


@pytest.mark.parametrize("accelerated", [False, True])
def test_a_closed_rank_fences_no_optimizer(accelerated: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, steps, in_flight = torch.optim.SGD([weight]), list[int](), saves(0.01)
    if accelerated:
        optimizer = Accelerator(cpu=True).prepare_optimizer(optimizer)
    in_flight.guard(optimizer, lambda: steps.append(1))
    optimizer.step()
    in_flight.close(log=True)
    optimizer.step()
    assert steps == [1]


def test_a_save_without_an_answer_ends_after_its_deadline() -> None:
    """Also if no later call of the checkpointer waits for its saves."""
    pending = Pending(SaveOutcome(SaveProgress(7), Cluster(), subscribers(), 0.01, late=0.0))  # type: ignore[arg-type]
    with pytest.raises(OutcomeUnknown, match="save of step 7: not durable after 0 s"):
        pending.result(60)
    assert pending.done()


def test_nothing_is_asked_about_a_save_that_has_ended() -> None:
    timers, cluster = {*threading.enumerate()}, Cluster()
    outcome = save(cluster=cluster)
    (timer,) = {*threading.enumerate()} - timers
    outcome.report(SaveFailed("a disk is full"))
    wait_until(lambda: not timer.is_alive(), "the end of the timer")
    assert cluster.reported == []


def test_result_returns_once_the_outcome_is_noted() -> None:
    """So a later ``save`` raises ``Fenced`` if ``result`` has, and ``close`` tells callbacks of the last version."""
    noting, noted, all = threading.Event(), threading.Event(), subscribers()

    def note(step: int) -> None:
        noting.set()
        assert noted.wait(60)

    all.save_failed = note
    outcome = SaveOutcome(SaveProgress(7), Cluster(), all, 60.0)  # type: ignore[arg-type]
    pending, ending = Pending(outcome), threading.Thread(target=outcome.report, args=(SaveFailed("a disk is full"),))
    ending.start()
    assert noting.wait(60)
    assert not pending.done()
    assert not pending.staged(0)
    noted.set()
    with pytest.raises(SaveFailed, match="a disk is full"):
        pending.result(60)
    ending.join(60)


def test_a_save_ends_if_its_outcome_cannot_be_noted() -> None:
    all = subscribers()
    all.save_failed = lambda step: 1 / 0
    outcome = SaveOutcome(SaveProgress(7), Cluster(), all, 60.0)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        outcome.report(SaveFailed("a disk is full"))
    assert Pending(outcome).done()
