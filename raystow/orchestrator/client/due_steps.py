"""Asks the coordinator ahead at which step to save, so that ``Checkpointer.due`` rarely waits for long."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable

from ...storage.errors import Fenced, RaystowError
from ...storage.log import Log
from ...storage.runtime import background
from ...workers.protocol.messages import AskNextSave, NextSave, OnFenced
from ..argument_checks import LONGEST
from .options import Interval
from .startup import Startup

_PATIENCE = 20.0  # seconds that the training waits for a coordinator that does not answer, once


def next_save(startup: Startup, on_fenced: OnFenced, first: int, interval: Interval, requested: bool) -> NextSave:
    """Ask the coordinator for its decision: see ``DueSteps``."""
    member, node = startup.member, startup.connection.node
    who = member.rank, member.incarnation, member.world_size
    asked = interval.seconds if interval.steps is None else LONGEST, interval.mtbf, interval.budget
    return startup.port.ask(AskNextSave(*who, first, *asked, on_fenced, node, requested))


def _on_a_thread(run: Callable[[], None]) -> None:
    background.start("raystow-due", run)


class DueSteps:
    """The due steps of one rank.

    ``ask(first, interval, requested)`` returns the coordinator's decision for the steps from ``first`` on. ``requested``: whether
    a save was requested here, and no step was due since.
    """

    def __init__(
        self,
        ask: Callable[[int, Interval, bool], NextSave],
        log: logging.Logger | Log,
        *,
        patience: float = _PATIENCE,
        start: Callable[[Callable[[], None]], None] = _on_a_thread,
    ) -> None:
        """``patience``: seconds to wait for an answer. ``start``: runs a function in the background."""
        self._ask, self._log, self._patience, self._start = ask, log, patience, start
        self._answer: concurrent.futures.Future[NextSave] | None = None
        self._last = -1, False
        self._lost = self._requested = False

    def request(self) -> None:
        """Request a save. May be called from a signal handler or another thread."""
        self._requested = True

    def due(self, step: int, interval: Interval) -> bool:
        """Whether to save this step by time, by request, or since a node will be removed."""
        if step == self._last[0]:
            return self._last[1]
        if self._answer is None or step < self._last[0]:  # the first question, or the training went back
            self._ask_ahead(step, interval)
        decision, due = self._decision(step, interval), False
        if decision is not None and decision.step <= step:
            due = decision.save
            if due:
                self._requested = False  # the save that follows is later than the request
            self._ask_ahead(step + 1, interval)
        self._last = step, due
        return due

    def _decision(self, step: int, interval: Interval) -> NextSave | None:
        """The answer to the newest question; None, with one warning, while the coordinator cannot be reached."""
        assert self._answer is not None
        try:
            decision = self._answer.result(0 if self._lost else self._patience)
        except Fenced:
            raise  # no step would ever be due
        except (RaystowError, concurrent.futures.TimeoutError) as error:
            if not self._lost:
                why = str(error) or f"no answer within {self._patience:.0f} s"
                self._log.warning("steps are due only by Interval.steps until the coordinator says when to save: %s", why)
            self._lost = True
            if self._answer.done():
                self._ask_ahead(step + 1, interval)
            return None
        self._lost = False
        return decision

    def _ask_ahead(self, first: int, interval: Interval) -> None:
        answer = self._answer = concurrent.futures.Future()

        def run() -> None:
            try:
                answer.set_result(self._ask(first, interval, self._requested))
            except Exception as error:
                answer.set_exception(error)

        self._start(run)
