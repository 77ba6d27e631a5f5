"""The saves of one rank that have not ended: how many there may be, and how long to wait for them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...state.optimizers import unwrapped_optimizer
from ...storage.errors import OutcomeUnknown
from ...storage.log import Log
from ...storage.runtime.clock import SYSTEM
from ...storage.versions.version import Version
from ...workers.staging.progress import SaveProgress
from .outcome_subscribers import OutcomeSubscribers
from .save_outcome import SaveOutcome
from .startup import Startup

if TYPE_CHECKING:
    import torch


class SavesInFlight:
    """At most ``limit`` saves, each of which ends at the latest some seconds after ``timeout`` seconds.

    Attributes:
        closed: Whether there will be no other save, and somebody has waited for all.
        restored: The version that the rank has restored last.
    """

    restored: Version | None

    def __init__(
        self, startup: Startup, subscribers: OutcomeSubscribers, *, limit: int, timeout: float, log: logging.Logger | Log
    ) -> None:
        self._startup, self._subscribers, self._limit, self._timeout, self._log = startup, subscribers, limit, timeout, log
        self._saves: list[SaveOutcome] = []
        self.closed, self.restored = False, None
        self._newest: Version | None = None  # of the saves that have ended
        self._logged: SaveOutcome | None = None
        self._guards = contextlib.ExitStack()  # removes the hooks of optimizers

    def begin(self, progress: SaveProgress) -> SaveOutcome:
        """Note a save that has begun, and return its outcome, which is unknown if it has not ended by its deadline."""
        outcome = SaveOutcome(progress, self._startup, self._subscribers, self._timeout)
        self._saves.append(outcome)
        return outcome

    def steps(self) -> dict[int, int]:
        """Return the steps of the saves that have not ended, by their numbers."""
        return {save.progress.number: save.progress.step for save in self._saves if not save.wait(0)}

    def wait_until_read(self, give_up: Callable[[str], None]) -> bool:
        """Wait until the tensors of all saves have been read. Call ``give_up``, with a reason, if one has not been after
        ``timeout`` seconds. Return whether there was anything to wait for."""
        start, waited = SYSTEM.monotonic(), [save.progress for save in self._saves if not save.progress.read.is_set()]
        for progress in waited:
            with progress.blocking(start):
                if not progress.wait(progress.read, max(0.0, start + self._timeout - SYSTEM.monotonic())):
                    give_up(f"nothing staged within {self._timeout:.0f} s: the node worker accepts no data")
        return bool(waited)

    def wait_for_oldest(self) -> None:
        """Wait until one more save may begin."""
        self._newest = self._newest_version()
        self._saves = [save for save in self._saves if not save.wait(0)]
        while len(self._saves) >= self._limit:
            oldest = self._saves[0]
            what, step = "%d saves are in flight: waiting for that of step %d", oldest.progress.step
            self._log.warning(what, len(self._saves), step, extra={"step": step})
            oldest.wait_until_late()
            self._saves = self._saves[1:]

    def wait_for_all(self, *, log: bool) -> None:
        """Wait until every save has ended. ``log``: whether to log an error if the newest one is not a version."""
        for save in self._saves:
            save.wait_until_late()
        if log:
            self.log_unsaved()

    def guard(self, optimizer: torch.optim.Optimizer, fence: Callable[[], None]) -> None:
        """Call ``fence`` before every step of an optimizer, until ``close``."""
        self._guards.callback(unwrapped_optimizer(optimizer).register_step_pre_hook(lambda *_: fence()).remove)

    def close(self, *, log: bool) -> None:
        """As ``wait_for_all``; there will be no other save."""
        self.wait_for_all(log=log)
        self._guards.close()
        self.closed = True

    def wait_until(self, time: float) -> None:
        """Wait until every save has ended, or until a ``time`` in monotonic seconds."""
        for save in self._saves:
            save.wait(max(0.0, time - SYSTEM.monotonic()))

    def unsaved(self) -> str:
        """Say that the newest save is not a version, why, and which version is the newest. "" if there is nothing to say."""
        if not self._saves or isinstance(outcome := self._saves[-1].value, Version):
            return ""
        step, version = self._saves[-1].progress.step, self._newest_version()
        text = f"step {step} was not saved: {outcome}"
        if outcome is None or isinstance(outcome, OutcomeUnknown):
            text = f"step {step} may not have been saved: {outcome or 'the save has not ended'}"
        if version is not None:
            return f"{text}; the newest version is {version.id} (step {version.step})"
        before = f", and has restored version {self.restored.id} (step {self.restored.step})" if self.restored is not None else ""
        return f"{text}; this process has saved no version{before}"

    def log_unsaved(self, why: str = "") -> None:
        """Log an error if the newest save is not a version, once. ``why``: what may have led to it."""
        if (unsaved := self.unsaved()) and self._logged is not self._saves[-1]:
            self._logged = self._saves[-1]
            self._log.error("%s%s", why, unsaved, extra={"step": self._logged.progress.step})

    def _newest_version(self) -> Version | None:
        versions = [save.value for save in self._saves if isinstance(save.value, Version)]
        return versions[-1] if versions else self._newest
