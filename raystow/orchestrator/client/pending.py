"""A save in flight."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from ...storage.errors import DeadlineExceeded, OutcomeUnknown, RaystowError
from ...storage.log import Log
from ...storage.notebook import facts_table
from ...storage.runtime import background
from ...storage.runtime.clock import SYSTEM
from ...storage.versions.version import Version

logger = logging.getLogger(__name__)


class Pending:
    """A save in flight: first *staged* (the node worker has all of it), then *durable* (it is a version) or failed.

    Attributes:
        step: The step given to ``save``.
        number: How many saves this rank has begun, with this one.
        begun: When ``save`` was called, in monotonic seconds.
        warnings: Problems with the state, and ranks that are late. Each is also logged, as soon as it is known.
    """

    def __init__(self, step: int, log: logging.Logger | Log = logger, *, number: int = 0) -> None:
        self.step, self._log = step, log
        self.number = number
        self.begun = SYSTEM.monotonic()
        self.warnings: tuple[str, ...] = ()
        self._blocked: tuple[float, float | None] = 0.0, None  # seconds so far, and since when the caller waits
        self._read, self._staged = threading.Event(), threading.Event()
        self._urgent = threading.Event()
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._outcome: Version | RaystowError | None = None
        self._timer: threading.Timer | None = None
        self._find: Callable[[OutcomeUnknown], object] = lambda unknown: None  # asks for it again

    def __repr__(self) -> str:
        return f"Pending(step={self.step}, {self._state()})"

    def _repr_html_(self) -> str:
        error = self._outcome if isinstance(self._outcome, RaystowError) else ""
        facts = {"state": self._state(), "training waited": f"{self.stall:.3f} s", "error": error}
        return facts_table(f"save of step {self.step}", {**facts, "warnings": "; ".join(self.warnings)})

    def _state(self) -> str:
        if self._outcome is None:
            return "in flight, staged" if self._staged.is_set() else "in flight"
        return {OutcomeUnknown: "outcome unknown", Version: "durable"}.get(type(self._outcome), "failed")

    @property
    def stall(self) -> float:
        """Seconds that ``save`` and ``fence`` have blocked the caller for this save so far."""
        before, since = self._blocked
        return before if since is None else before + SYSTEM.monotonic() - since

    def done(self) -> bool:
        """Tell whether the save has ended.

        Returns:
            True once it is durable, has failed, or has ended with an unknown outcome.
        """
        return self._ended.is_set()

    def staged(self, timeout: float | None = None) -> bool:
        """Wait until the node worker has all that this rank saves: it completes the save even if this process is killed then.

        The tensors may change as well. ``fence`` returns earlier, when they have been read. A wait raises the priority of reading
        them over other work of the GPU.

        Args:
            timeout: Seconds to wait. None: no limit. 0 polls, without raising the priority.

        Returns:
            Whether the node worker has it. True for a save that has failed.
        """
        return self._wait(self._staged, timeout)

    def _wait(self, event: threading.Event, timeout: float | None) -> bool:
        if timeout != 0:
            self._urgent.set()
        return event.wait(timeout)

    def result(self, timeout: float | None = None) -> Version:
        """Wait for the version.

        If the outcome is unknown, each call asks the store and the coordinator again, for up to some seconds.

        Args:
            timeout: Seconds to wait. None: no limit.

        Returns:
            The committed version.

        Raises:
            SaveFailed: The save has failed. It is no version, and will not become one.
            OutcomeUnknown: The save has ended, and neither the store nor the coordinator can say yet whether it is a version.
            Fenced: Another run has taken over the repository.
            DeadlineExceeded: The save has not ended after ``timeout`` seconds.
        """
        if not self._ended.wait(timeout):
            raise DeadlineExceeded(f"not durable after {timeout:g} s", subject=f"save of step {self.step}")
        if isinstance(self._outcome, OutcomeUnknown):
            self._find(self._outcome)
        if isinstance(self._outcome, Version):
            return self._outcome
        assert self._outcome is not None
        raise self._outcome

    @contextlib.contextmanager
    def _blocking(self, since: float) -> Iterator[None]:
        """Count the time that the caller waits for this save, from ``since`` (monotonic seconds) on."""
        before = self._blocked[0]
        self._blocked = before, since
        try:
            yield
        finally:
            self._blocked = before + SYSTEM.monotonic() - since, None

    def _end_after(self, seconds: float, end: Callable[[], object]) -> None:
        """Call ``end`` in the background if the save has not ended after some seconds."""
        self._timer = background.after(max(0.0, seconds), "raystow-late", end)
        if self.done():
            self._timer.cancel()

    def _warn(self, text: str) -> None:
        self._log.warning("save of step %d: %s", self.step, text, extra={"step": self.step})
        self.warnings += (text,)

    def _set_outcome(
        self, outcome: Version | RaystowError, note: Callable[[Version | RaystowError | None], object] = lambda before: None
    ) -> None:
        """End the save, or replace an unknown outcome; a known one stays. ``note`` gets the outcome before.

        Threads that wait for the save continue after ``note`` has returned, so they see its effects.
        """
        with self._lock:
            before = self._outcome
            if before is None or isinstance(before, OutcomeUnknown):
                self._outcome = outcome
            try:
                note(before)
            finally:
                self._ended.set()
                self._read.set()
                self._staged.set()
                if self._timer is not None:
                    self._timer.cancel()
