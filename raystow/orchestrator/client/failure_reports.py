"""Reports failed saves to the coordinator and logs each once in the whole run, by the rank that reports it first."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ...storage.errors import RaystowError
from ...storage.log import Log
from ...storage.runtime import background
from ...storage.runtime.clock import SYSTEM


class FailureReports:
    """The reports of one rank. ``send(number, step, reason)`` calls the coordinator and returns whether to log the failure."""

    def __init__(self, send: Callable[[int, int, str], bool], log: logging.Logger | Log) -> None:
        self.send, self._log = send, log
        self._unlogged: dict[int, tuple[int, str]] = {}  # by number of the save
        self._threads: list[threading.Thread] = []

    def report(self, number: int, step: int, reason: str, text: str) -> None:
        """Report the ``number``-th save of this rank, so that other ranks do not wait for it. ``text``: what to log."""
        self._unlogged[number] = step, text
        # In a thread of its own: a frozen coordinator blocks the call for as long as an answer may take.
        thread = background.start("raystow-report", self._report, number, step, reason)
        self._threads = [*(thread for thread in self._threads if thread.is_alive()), thread]

    def flush(self, patience: float) -> None:
        """Wait up to ``patience`` seconds for answers; then log what is not logged, since the process may end."""
        until = SYSTEM.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, until - SYSTEM.monotonic()))
        for number in list(self._unlogged):
            self._log_once(number, logging.WARNING)

    def _report(self, number: int, step: int, reason: str) -> None:
        first = True
        try:
            first = self.send(number, step, reason)
        except RaystowError as unreachable:
            self._log.warning("the failure could not be reported to the coordinator: %s", unreachable, extra={"step": step})
        self._log_once(number, logging.WARNING if first else logging.DEBUG)

    def _log_once(self, number: int, level: int) -> None:
        if (failure := self._unlogged.pop(number, None)) is not None:
            step, text = failure
            self._log.log(level, "%s", text, extra={"step": step})
