"""A save that is under way."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Iterator

from ..storage.clock import SYSTEM
from ..storage.errors import DeadlineExceeded, RaystowError
from ..storage.log import Log
from ..storage.version import Version

logger = logging.getLogger(__name__)


class Pending:
    """What ``save`` returns: first *staged* (the tensors may change), then *durable* (a version), or failed."""

    def __init__(self, step: int, log: logging.Logger | Log = logger) -> None:
        self.step, self._log = step, log
        self.begun = SYSTEM.monotonic()
        """When ``save`` was called, in monotonic seconds."""
        self.warnings: tuple[str, ...] = ()
        """What the node worker found odd in what was saved; complete when the save is done, and logged."""
        self._held: tuple[float, float | None] = 0.0, None  # seconds so far, and since when the caller is held up
        self._staged = threading.Event()
        self._urgent = threading.Event()
        self._outcome: concurrent.futures.Future[Version] = concurrent.futures.Future()

    def __repr__(self) -> str:
        state = "failed" if self.done() and self._outcome.exception() else "durable" if self.done() else "in flight"
        return f"Pending(step={self.step}, {state})"

    @property
    def stall(self) -> float:
        """Seconds that ``save`` and ``fence`` have held the caller up for this save so far."""
        before, since = self._held
        return before if since is None else before + SYSTEM.monotonic() - since

    def done(self) -> bool:
        """Whether the save is durable or has failed."""
        return self._outcome.done()

    def staged(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds until the tensors may change (also true of a save that failed). Meanwhile reading them
        goes before whatever else the GPU does; 0 asks, and hurries nobody."""
        if timeout != 0:
            self._urgent.set()
        return self._staged.wait(timeout)

    def result(self, timeout: float | None = None) -> Version:
        """The committed version; ``SaveFailed`` if there will be none, ``DeadlineExceeded`` after ``timeout`` seconds."""
        try:
            return self._outcome.result(timeout)
        except concurrent.futures.TimeoutError:
            raise DeadlineExceeded(f"not durable after {timeout:g} s", subject=f"save of step {self.step}") from None

    @contextlib.contextmanager
    def _holding_up(self, since: float) -> Iterator[None]:
        """The caller waits for this save, and has done so ``since`` (monotonic seconds)."""
        before = self._held[0]
        self._held = before, since
        try:
            yield
        finally:
            self._held = before + SYSTEM.monotonic() - since, None

    def _set_staged(self) -> None:
        self._staged.set()

    def _warn(self, text: str) -> None:
        self._log.warning("save of step %d: %s", self.step, text, extra={"step": self.step})
        self.warnings += (text,)

    def _set_outcome(self, outcome: Version | RaystowError) -> bool:
        """The end of it; false if it had ended before."""
        try:
            if isinstance(outcome, RaystowError):
                self._outcome.set_exception(outcome)
            else:
                self._outcome.set_result(outcome)
        except concurrent.futures.InvalidStateError:
            return False
        self._staged.set()
        return True
