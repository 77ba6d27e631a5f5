"""What follows from the outcome of each save of a rank."""

from __future__ import annotations

from collections.abc import Callable

from ...storage.errors import Fenced, OutcomeUnknown, RaystowError
from ...storage.runtime.clock import SYSTEM
from ...storage.runtime.metrics import DURABLE, record
from ...storage.versions.version import Version
from ...workers.staging.progress import SaveProgress
from .failure_reports import FailureReports
from .failures import Failures
from .version_callbacks import VersionCallbacks

_REPORTS = 5.0  # seconds to wait for the coordinator to note failed saves


class OutcomeSubscribers:
    """Those that learn the outcome of each save: the rank's counters, the coordinator, callbacks, the journal and Ray Train.

    Attributes:
        save_failed: Called with the step of a failed save, before those that wait for the save go on.
        concluded: Called after each outcome.
    """

    def __init__(self, failures: Failures, reports: FailureReports, callbacks: VersionCallbacks, *, uri: str) -> None:
        self._failures, self._reports, self._callbacks, self._uri = failures, reports, callbacks, uri
        self.save_failed: Callable[[int], object] = lambda step: None
        self.concluded: Callable[[], object] = lambda: None

    def note(self, save: SaveProgress, before: Version | RaystowError | None, outcome: Version | RaystowError) -> None:
        """Note the outcome of a save, whose outcome was ``before`` until now."""
        match before, outcome:
            case None, RaystowError() as error:
                self.save_failed(save.step)
                text = self._failures.failed(save.step, error)
                self._reports.report(save.number, save.step, error.what, text)
            case None, Version() as version:
                self._failures.succeeded()
                self._callbacks.tell(version)
                record(DURABLE, SYSTEM.monotonic() - save.begun, repository=self._uri)
            case OutcomeUnknown(), Fenced() as fenced:
                self._failures.fenced(fenced)
            case OutcomeUnknown() as unknown, Version() as version:
                self._failures.found_durable(unknown)
                self._callbacks.tell(version)

    def close(self) -> None:
        """Wait some seconds until the coordinator has noted failed saves, and until callbacks have returned."""
        self._reports.flush(_REPORTS)
        self._callbacks.close()
