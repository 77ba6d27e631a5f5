"""The saves of one rank that have not ended: how many there may be, and how long to wait for them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...storage.commit.committer import UNKNOWN
from ...storage.errors import DeadlineExceeded, OutcomeUnknown, RaystowError
from ...storage.log import Log
from ...storage.runtime.clock import SYSTEM
from ...storage.versions.version import Version
from .pending import Pending
from .save_outcome import SOON

if TYPE_CHECKING:
    import torch

_LATE = 10.0  # seconds after the deadline of a save in which its outcome may still arrive


class SavesInFlight:
    """At most ``limit`` saves. ``conclude`` ends a save that has not ended ``timeout`` seconds after it began.

    Attributes:
        closed: Whether there will be no other save, and somebody has waited for all.
        restored: The version that the rank has restored last.
    """

    restored: Version | None

    def __init__(
        self, limit: int, timeout: float, conclude: Callable[[Pending, RaystowError], None], log: logging.Logger | Log
    ) -> None:
        self._limit, self._timeout, self._conclude, self._log = limit, timeout, conclude, log
        self._saves: list[Pending] = []
        self.closed, self.restored = False, None
        self._newest: Version | None = None  # of the saves that have ended
        self._logged: Pending | None = None
        self._guards = contextlib.ExitStack()  # removes the hooks of optimizers

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
        self._newest = self._newest_version()
        self._saves = [pending for pending in self._saves if not pending.done()]
        while len(self._saves) >= self._limit:
            oldest = self._saves[0]
            what = "%d saves are in flight: waiting for that of step %d"
            self._log.warning(what, len(self._saves), oldest.step, extra={"step": oldest.step})
            self._wait(oldest)
            self._saves = self._saves[1:]

    def wait_for_all(self, *, log: bool) -> None:
        """Wait until every save has ended. ``log``: whether to log an error if the newest one is not a version."""
        for pending in self._saves:
            self._wait(pending)
        if log:
            self.log_unsaved()

    def guard(self, optimizer: torch.optim.Optimizer, fence: Callable[[], None]) -> None:
        """Call ``fence`` before every step of an optimizer, until ``close``."""
        self._guards.callback(optimizer.register_step_pre_hook(lambda *_: fence()).remove)

    def close(self, *, log: bool) -> None:
        """As ``wait_for_all``; there will be no other save."""
        self.wait_for_all(log=log)
        self._guards.close()
        self.closed = True

    def wait_until(self, time: float) -> None:
        """Wait until every save has ended, or until a ``time`` in monotonic seconds."""
        for pending in self._saves:
            pending._ended.wait(max(0.0, time - SYSTEM.monotonic()))

    def unsaved(self) -> str:
        """Say that the newest save is not a version, why, and which version is the newest. "" if there is nothing to say."""
        outcome = self._saves[-1]._outcome if self._saves else None
        if not self._saves or isinstance(outcome, Version):
            return ""
        text, version = f"step {self._saves[-1].step} was not saved: {outcome}", self._newest_version()
        if outcome is None or isinstance(outcome, OutcomeUnknown):
            text = f"step {self._saves[-1].step} may not have been saved: {outcome or 'the save has not ended'}"
        if version is not None:
            return f"{text}; the newest version is {version.id} (step {version.step})"
        before = f", and has restored version {self.restored.id} (step {self.restored.step})" if self.restored is not None else ""
        return f"{text}; this process has saved no version{before}"

    def log_unsaved(self, why: str = "") -> None:
        """Log an error if the newest save is not a version, once. ``why``: what may have led to it."""
        if (unsaved := self.unsaved()) and self._logged is not self._saves[-1]:
            self._logged = self._saves[-1]
            self._log.error("%s%s", why, unsaved, extra={"step": self._logged.step})

    def _newest_version(self) -> Version | None:
        versions = [pending._outcome for pending in self._saves if isinstance(pending._outcome, Version)]
        return versions[-1] if versions else self._newest

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
