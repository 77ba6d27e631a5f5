"""The outcome of one save: nothing yet, a version, or an error; an unknown outcome may still become known."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from ...storage.commit.committer import UNKNOWN, outcome_in
from ...storage.errors import Fenced, NotARepository, NotFound, OutcomeUnknown, RaystowError, SaveFailed
from ...storage.format.root import Entry
from ...storage.repository import Repository
from ...storage.runtime import background
from ...storage.runtime.clock import SYSTEM
from ...storage.versions.version import Version
from ...workers.protocol.messages import FindOutcome
from ...workers.staging.progress import SaveProgress
from .outcome_subscribers import OutcomeSubscribers
from .startup import Startup

_SOON = 10.0  # seconds within which the coordinator must say what has become of a save that is over
_LATE = 10.0  # seconds after the deadline of a save in which its outcome may still arrive


class SaveOutcome:
    """Ends the save once: by what the staging thread reports, or as unknown after its deadline.

    Args:
        progress: The save. Threads that wait for it go on when its outcome is set.
        startup: The rank's connection to the coordinator and the repository, which are asked for an unknown outcome.
        subscribers: Those that learn the outcome, before the threads that wait for the save go on.
        timeout: Seconds after which the coordinator gives the save up.

    Attributes:
        value: The version, or the error; None before the save has ended.
    """

    def __init__(
        self, progress: SaveProgress, startup: Startup, subscribers: OutcomeSubscribers, timeout: float, late: float = _LATE
    ) -> None:
        self.progress, self._startup, self._subscribers, self._timeout = progress, startup, subscribers, timeout
        self.value: Version | RaystowError | None = None
        self._until = progress.begun + timeout + late
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._timer = background.after(self._left(), "raystow-late", self._expire)

    def wait(self, timeout: float | None) -> bool:
        """Wait until the save has ended. Return whether it has."""
        return self._ended.wait(timeout)

    def wait_until_late(self) -> None:
        """Wait until the save has ended, but not past its deadline; then its outcome is unknown."""
        if self.wait(self._left()):
            self.find_again()
        else:
            self._set(self._late())

    def find_again(self) -> Version | RaystowError:
        """Return the outcome of a save that has ended. If it is unknown, ask for it again, for some seconds."""
        if isinstance(self.value, OutcomeUnknown):
            self._find(self.value, _SOON)
        assert self.value is not None
        return self.value

    def report(self, outcome: Entry | RaystowError) -> None:
        """End the save by what the node worker says of it, or by what has failed in this process."""
        if isinstance(outcome, OutcomeUnknown):  # to ask may take as long as a frozen coordinator does
            background.start("raystow-outcome", self._give_up, outcome, max(_SOON, self._left()))
        else:
            self._set(self._startup.repository().at(outcome) if isinstance(outcome, Entry) else outcome)

    def _expire(self) -> None:
        self._give_up(self._late(), _SOON)

    def _give_up(self, unknown: OutcomeUnknown, patience: float) -> None:
        """Let the coordinator give the save up if it waits for this rank, and learn the outcome."""
        with contextlib.suppress(RaystowError):
            self._startup.report_failure(self.progress.number, self.progress.step, unknown.what)
        self._find(unknown, patience)

    def _find(self, unknown: OutcomeUnknown, patience: float) -> None:
        """Ask the root and the coordinator, up to ``patience`` seconds, for an outcome that is unknown so far."""
        port = self._startup.port

        def ask(id: int, attempt: str) -> Entry:
            return port.ask(FindOutcome(id, attempt), timeout=patience).entry

        self._set(find_outcome(self._startup.repository(), ask, self.progress.attempt, unknown))

    def _set(self, outcome: Version | RaystowError) -> None:
        """Set the outcome, or replace an unknown one; a known one stays."""
        with self._lock:
            before = self.value
            if before is None or isinstance(before, OutcomeUnknown):
                self.value = outcome
            try:
                self._subscribers.note(self.progress, before, outcome)
            finally:
                self._ended.set()
                self.progress.end(outcome if isinstance(outcome, RaystowError) else "")
                self._timer.cancel()
        self._subscribers.concluded()

    def _late(self) -> OutcomeUnknown:
        what = f"not durable after {self._timeout:.0f} s, for an unknown reason; it may still become a version"
        return OutcomeUnknown(what, subject=self.progress.subject, remedy=UNKNOWN)

    def _left(self) -> float:
        return max(0.0, self._until - SYSTEM.monotonic())


def find_outcome(
    repository: Repository,
    ask: Callable[[int, str], Entry],
    attempt: tuple[int, str] | None,
    unknown: OutcomeUnknown,
) -> Version | RaystowError:
    """Return the version that an attempt (id, name) has become, or the error that says that it has become none.

    The root is asked first, since a version in it is certain, and the coordinator next, which may still commit the attempt.
    ``unknown`` is returned if neither can say. ``ask``: asks the coordinator for the entry, and raises as ``outcome_in``.
    """
    if attempt is None:
        return unknown
    id, name = attempt
    for in_root in (True, False):
        try:
            return repository.at(outcome_in(repository.root(), id, name) if in_root else ask(id, name))
        except (SaveFailed, Fenced, NotFound) as error:
            return type(error)(error.what, subject=unknown.subject, remedy=error.remedy)
        except NotARepository as error:  # with the repository, all of its versions are gone
            return SaveFailed(f"{error.subject}: {error.what}", subject=unknown.subject, remedy=error.remedy)
        except RaystowError:
            pass  # it does not answer, or does not know
    return unknown
