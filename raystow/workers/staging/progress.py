"""How far a save is: what its staging thread reports, and what the training thread waits for."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from ...storage.log import Log
from ...storage.runtime.clock import SYSTEM
from ...storage.runtime.metrics import STAGED, record
from ...storage.runtime.spans import ROOT, Span

logger = logging.getLogger(__name__)


class SaveProgress:
    """The progress of one save of a rank.

    Args:
        uri: The repository.
        number: How many saves this rank has begun, with this one.

    Attributes:
        begun: When the save began, in monotonic seconds.
        read: Set when all tensors have been read.
        staged: Set when the node worker has all of the save, when the save is a version, or when it has failed.
        urgent: Set while the training waits for the staging.
        attempt: The id and the name of the save's attempt, once known.
        trace: Of the save's span; see ``storage.runtime.spans``.
        warnings: Each is also logged, as soon as it is known.
    """

    def __init__(self, step: int, *, number: int = 0, uri: str = "", log: logging.Logger | Log = logger) -> None:
        self.step, self.number, self._uri, self._log = step, number, uri, log
        self.begun = SYSTEM.monotonic()
        self.read, self.staged, self.urgent = threading.Event(), threading.Event(), threading.Event()
        self.attempt: tuple[int, str] | None = None
        self.warnings: tuple[str, ...] = ()
        self._blocked: tuple[float, float | None] = 0.0, None  # seconds so far, and since when the caller waits
        self.trace, self._rank, self._planned = ROOT, -1, (self.begun, self.begun)
        self._staged_at: float | None = None
        self._traced = False

    @property
    def subject(self) -> str:
        """Names the save in errors."""
        return f"save of step {self.step}"

    @property
    def stall(self) -> float:
        """Seconds for which the caller was blocked for this save so far."""
        before, since = self._blocked
        return before if since is None else before + SYSTEM.monotonic() - since

    @contextlib.contextmanager
    def blocking(self, since: float) -> Iterator[None]:
        """Count the time that the caller waits for this save, from ``since`` (monotonic seconds) on."""
        before = self._blocked[0]
        self._blocked = before, since
        try:
            yield
        finally:
            self._blocked = before + SYSTEM.monotonic() - since, None

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        """Wait for ``read`` or ``staged``, and raise the priority of reading meanwhile. ``timeout``: seconds; 0 polls only."""
        if timeout != 0:
            self.urgent.set()
        return event.wait(timeout)

    def note_planned(self, rank: int, trace: str, made: tuple[float, float]) -> None:
        """Note the rank, the span in which ``save`` was called, and from when to when the plan was made, in monotonic seconds."""
        self._rank, self.trace, self._planned = rank, trace or ROOT, made

    def note_staged(self) -> None:
        """Note that the node worker has all of the save, or that the save is a version."""
        if not self.staged.is_set():
            self._staged_at = SYSTEM.monotonic()
            record(STAGED, SYSTEM.monotonic() - self.begun, repository=self._uri)
        self.staged.set()

    def warn(self, text: str) -> None:
        """Note and log a problem."""
        self._log.warning("%s: %s", self.subject, text, extra={"step": self.step})
        self.warnings += (text,)

    def end(self, error: object = "") -> None:
        """Let all threads that wait go on: the save has ended. ``error``: why it is no version."""
        self.read.set()
        self.staged.set()
        if self._traced:
            return
        self._traced, (begun, planned) = True, self._planned
        rank = Span("save.rank", self.trace, begun=begun, rank=self._rank, step=self.step, repository=self._uri or None)
        Span("save.plan", rank.trace, begun=begun).end(at=planned)
        Span("save.stage", rank.trace, begun=planned).end("" if self._staged_at else error, at=self._staged_at)
        rank.end(error, stall=self.stall)
