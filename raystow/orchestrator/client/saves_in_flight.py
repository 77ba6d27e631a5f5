"""The saves of one rank that have not ended: how many there may be, and how long to wait for them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ...storage.clock import SYSTEM
from ...storage.committer import UNKNOWN
from ...storage.errors import DeadlineExceeded, OutcomeUnknown, RaystowError
from ...storage.log import Log
from .pending import Pending

SOON = 10.0
"""Seconds within which the coordinator must say what has become of a save that is over."""

_LATE = 10.0  # seconds after the deadline of a save in which its outcome may still arrive


class SavesInFlight:
    """At most ``limit`` saves. ``conclude`` ends a save that has not ended ``timeout`` seconds after it began."""

    def __init__(
        self, limit: int, timeout: float, conclude: Callable[[Pending, RaystowError], None], log: logging.Logger | Log
    ) -> None:
        self._limit, self._timeout, self._conclude, self._log = limit, timeout, conclude, log
        self._saves: list[Pending] = []

    def add(self, pending: Pending, learn: Callable[[OutcomeUnknown], None]) -> None:
        """Note a save that has begun. ``learn`` is called in the background if it has not ended by its deadline."""
        self._saves.append(pending)
        pending._end_after(self._left(pending), lambda: learn(self._late(pending)))

    def steps(self) -> list[int]:
        """Return the steps of the saves that have not ended."""
        return [pending.step for pending in self._saves if not pending.done()]

    def wait_until_read(self, give_up: Callable[[str], None]) -> bool:
        """Wait until the tensors of all saves have been read. Call ``give_up``, with a reason, if one has not been after
        ``timeout`` seconds. Return whether there was anything to wait for."""
        start, waited = SYSTEM.monotonic(), [pending for pending in self._saves if not pending._read.is_set()]
        for pending in waited:
            with pending._blocking(start):
                if not pending._wait(pending._read, max(0.0, start + self._timeout - SYSTEM.monotonic())):
                    give_up(f"nothing staged within {self._timeout:.0f} s: the node worker accepts no data")
        return bool(waited)

    def wait_for_oldest(self) -> None:
        """Wait until one more save may begin."""
        self._saves = [pending for pending in self._saves if not pending.done()]
        while len(self._saves) >= self._limit:
            oldest = self._saves[0]
            what = "%d saves are in flight: waiting for that of step %d"
            self._log.warning(what, len(self._saves), oldest.step, extra={"step": oldest.step})
            self._wait(oldest)
            self._saves = self._saves[1:]

    def wait_for_all(self) -> None:
        """Wait until every save has ended."""
        for pending in self._saves:
            self._wait(pending)

    def _wait(self, pending: Pending) -> None:
        """Wait until a save has ended, but not past its deadline; then its outcome is unknown."""
        try:
            pending.result(max(0.0, self._left(pending)))
        except DeadlineExceeded:
            self._conclude(pending, self._late(pending))
        except RaystowError:
            pass  # counted and logged when it was reported

    def _late(self, pending: Pending) -> OutcomeUnknown:
        what = f"not durable after {self._timeout:.0f} s, for an unknown reason; it may still become a version"
        return OutcomeUnknown(what, subject=f"save of step {pending.step}", remedy=UNKNOWN)

    def left(self, pending: Pending) -> float:
        """Return the seconds to wait for the coordinator, which decides about a save until its deadline."""
        return max(SOON, self._left(pending))

    def _left(self, pending: Pending) -> float:
        return pending.begun + self._timeout + _LATE - SYSTEM.monotonic()
