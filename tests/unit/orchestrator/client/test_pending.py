"""The state of a save in progress, as its caller sees it."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from raystow.orchestrator.client import saves_in_flight
from raystow.orchestrator.client.pending import Pending
from raystow.orchestrator.client.saves_in_flight import SavesInFlight
from raystow.storage.errors import OutcomeUnknown, SaveFailed
from raystow.storage.runtime.clock import SYSTEM


def test_the_stall_grows_only_while_the_caller_waits() -> None:
    pending = Pending(1)
    assert pending.stall == 0
    with pending._blocking(SYSTEM.monotonic() - 5):
        assert pending.stall >= 5  # the value during the wait
    first = pending.stall
    assert 5 <= first == pending.stall
    with pending._blocking(SYSTEM.monotonic() - 7):
        assert pending.stall >= first + 7
    assert first + 7 <= pending.stall


def test_waiting_raises_the_priority_and_polling_does_not() -> None:
    pending = Pending(1)
    assert not pending.staged(0)
    assert not pending._urgent.is_set()
    assert not pending.staged(1e-3)
    assert pending._urgent.is_set()


def test_a_fence_waits_for_the_reading_only() -> None:
    """The node worker's answer comes later."""
    pending, late = Pending(1), list[str]()
    in_flight = saves(600.0)
    in_flight.add(pending, pending._set_outcome)
    pending._read.set()
    assert not in_flight.wait_until_read(late.append)
    assert not pending.staged(0)
    pending._set_outcome(SaveFailed("a disk is full"))
    assert pending.staged()
    assert late == []


def test_a_fence_gives_up_reading_after_the_timeout() -> None:
    pending, told = Pending(1), list[str]()
    in_flight = saves(0.01)
    in_flight.add(pending, lambda unknown: None)
    assert in_flight.wait_until_read(told.append)
    assert told == ["nothing staged within 0 s: the node worker accepts no data"]
    pending._set_outcome(SaveFailed("the node worker accepts no data"))
    assert not in_flight.wait_until_read(told.append)


def saves(timeout: float) -> SavesInFlight:
    return SavesInFlight(2, timeout, lambda pending, error: None, logging.getLogger("raystow"))


def test_a_closed_rank_fences_no_optimizer() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, steps, in_flight = torch.optim.SGD([weight]), list[int](), saves(0.01)
    in_flight.guard(optimizer, lambda: steps.append(1))
    optimizer.step()
    in_flight.close(log=True)
    optimizer.step()
    assert steps == [1]


def test_a_save_without_an_answer_ends_after_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if no later call of the checkpointer waits for its saves."""
    monkeypatch.setattr(saves_in_flight, "_LATE", 0.0)
    pending = Pending(7)
    saves(0.01).add(pending, pending._set_outcome)
    with pytest.raises(OutcomeUnknown, match="save of step 7: not durable after 0 s"):
        pending.result(60)
    assert pending.done()


@pytest.mark.parametrize("before", [False, True])
def test_nothing_is_asked_about_a_save_that_has_ended(before: bool) -> None:
    """It may have ended before it is noted as in flight."""
    pending, asked = Pending(7), list[OutcomeUnknown]()
    ends = [lambda: saves(600.0).add(pending, asked.append), lambda: pending._set_outcome(SaveFailed("a disk is full"))]
    for step in reversed(ends) if before else ends:
        step()
    assert pending._timer is not None
    pending._timer.join(60)
    assert not pending._timer.is_alive()
    assert asked == []


def test_result_returns_once_the_outcome_is_noted() -> None:
    """So a later ``save`` raises ``Fenced`` if ``result`` has, and ``close`` tells callbacks of the last version."""
    pending, noting, noted = Pending(7), threading.Event(), threading.Event()

    def note(before: object) -> None:
        noting.set()
        assert noted.wait(60)

    ending = threading.Thread(target=pending._set_outcome, args=(SaveFailed("a disk is full"), note))
    ending.start()
    assert noting.wait(60)
    assert not pending.done()
    assert not pending.staged(0)
    noted.set()
    with pytest.raises(SaveFailed, match="a disk is full"):
        pending.result(60)
    ending.join(60)


def test_a_save_ends_if_its_outcome_cannot_be_noted() -> None:
    pending = Pending(7)
    with pytest.raises(ZeroDivisionError):
        pending._set_outcome(SaveFailed("a disk is full"), lambda before: 1 / 0)
    assert pending.done()
