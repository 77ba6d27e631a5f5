"""Learns what has become of each save of a rank, and tells those that must know."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

from ...storage.commit.committer import outcome_in
from ...storage.errors import Fenced, NotARepository, NotFound, OutcomeUnknown, RaystowError, SaveFailed
from ...storage.format.root import Entry
from ...storage.object_store import ObjectStore
from ...storage.repository import Repository
from ...storage.runtime import background
from ...storage.runtime.clock import SYSTEM
from ...storage.runtime.metrics import DURABLE, record
from ...storage.versions.version import Version
from ...workers.protocol.messages import FindOutcome
from ...workers.staging.plan import SaveOrder
from .failure_reports import FailureReports
from .failures import Failures
from .pending import Pending
from .startup import Startup
from .version_callbacks import VersionCallbacks

SOON = 10.0
"""Seconds within which the coordinator must say what has become of a save that is over."""

_REPORTS = 5.0  # seconds to wait for the coordinator to note failed saves


class SaveOutcomes:
    """The outcomes of one rank's saves.

    Attributes:
        save_failed: Called with the step of a failed save, before those that wait for the save go on.
        concluded: Called after each outcome.
    """

    def __init__(
        self, startup: Startup, store: ObjectStore, failures: Failures, reports: FailureReports, callbacks: VersionCallbacks
    ) -> None:
        self._startup, self._store = startup, store
        self._failures, self._reports, self._callbacks = failures, reports, callbacks
        self.save_failed: Callable[[int], object] = lambda step: None
        self.concluded: Callable[[], object] = lambda: None

    def conclude(self, pending: Pending, outcome: Version | RaystowError) -> None:
        """End a save, or replace its unknown outcome."""
        pending._set_outcome(outcome, functools.partial(self._note, pending, outcome))
        self.concluded()

    def ended(self, pending: Pending, order: SaveOrder, outcome: Entry | RaystowError, patience: float) -> None:
        """End a save with what the node worker says. ``patience``: see ``learn``."""
        if isinstance(outcome, OutcomeUnknown):  # to ask may take as long as a frozen coordinator does
            background.start("raystow-outcome", self.learn, pending, order, outcome, patience)
            return
        repository = self._startup.wait().repository
        self.conclude(pending, Version(self._store, outcome, repository) if isinstance(outcome, Entry) else outcome)

    def learn(self, pending: Pending, order: SaveOrder, unknown: OutcomeUnknown, patience: float = SOON) -> None:
        """Let the coordinator give the save up if it waits for this rank, and learn the outcome within ``patience`` seconds."""
        with contextlib.suppress(RaystowError):
            self._reports.send(pending.number, pending.step, unknown.what)
        self.find(pending, order, unknown, patience)

    def find(self, pending: Pending, order: SaveOrder, unknown: OutcomeUnknown, patience: float = SOON) -> None:
        """Ask the root and the coordinator, up to ``patience`` seconds, for the outcome of a save that is unknown so far."""
        port = self._startup.port

        def ask(id: int, attempt: str) -> Entry:
            return port.ask(FindOutcome(id, attempt), timeout=patience).entry

        self.conclude(pending, find_outcome(self._startup.repository(), ask, order.attempt, unknown))

    def close(self) -> None:
        """Wait some seconds until the coordinator has noted failed saves, and until callbacks have returned."""
        self._reports.flush(_REPORTS)
        self._callbacks.close()

    def _note(self, pending: Pending, outcome: Version | RaystowError, before: Version | RaystowError | None) -> None:
        match before, outcome:
            case None, RaystowError() as error:
                self.save_failed(pending.step)
                text = self._failures.failed(pending.step, error)
                self._reports.report(pending.number, pending.step, error.what, text)
            case None, Version() as version:
                self._failures.succeeded()
                self._callbacks.tell(version)
                record(DURABLE, SYSTEM.monotonic() - pending.begun, repository=self._startup.uri)
            case OutcomeUnknown(), Fenced() as fenced:
                self._failures.fenced(fenced)
            case OutcomeUnknown() as unknown, Version() as version:
                self._failures.found_durable(unknown)
                self._callbacks.tell(version)


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
