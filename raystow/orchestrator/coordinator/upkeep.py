"""The threads of a coordinator that use the store: they commit, apply retention and delete. Never touches open attempts."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from ...storage.commit.committer import UNKNOWN, Committer
from ...storage.errors import OutcomeUnknown, RaystowError
from ...storage.format.root import Entry
from ...storage.format.version_record import VersionRecord
from ...storage.log import about
from ...storage.retention.policy import Policy
from ...storage.runtime import background, metrics
from ...storage.runtime.clock import SYSTEM
from ...storage.runtime.spans import span
from ...storage.stores.settings import JobSettings
from .exports import Exports
from .housekeeping import Housekeeping

logger = logging.getLogger(__name__)


class Upkeep:
    """The store operations for the repository of a committer. No method raises.

    Attributes:
        exports: Which ``export`` is due.
        due: The policy of the newest version, until it is applied, and the trace of that version's save.
    """

    def __init__(self, committer: Committer, settings: JobSettings | None = None) -> None:
        self._committer, self._uri = committer, committer.catalog.uri
        self._housekeeping = Housekeeping(committer)
        self.exports = Exports(committer.catalog, settings, in_charge=lambda root: root.owner == committer.fence.owner)
        self.due: tuple[Policy, str] | None = None
        self._errors = background.ErrorLog("housekeeping")

    def commit(self, version: VersionRecord, trace: str) -> Entry | RaystowError:
        """Make a complete attempt a version. Returns its entry, or the error. ``trace``: of the save's span, here and below."""
        begun = SYSTEM.monotonic()
        try:
            with span("save.commit", trace, repository=self._uri, version=version.id):
                return self._committer.commit(version).entry
        except RaystowError as error:
            return error
        except Exception as error:  # an attempt that is not over would be committed again and again
            about(logger, repository=self._uri, version=version.id, attempt=version.attempt).exception("the commit failed")
            return OutcomeUnknown(f"the commit failed: {error!r}", subject=f"version {version.id}", remedy=UNKNOWN)
        finally:
            metrics.record(metrics.COMMIT, SYSTEM.monotonic() - begun, repository=self._uri)

    def apply_retention(self, policy: Policy, bases: Collection[int], trace: str) -> None:
        """Apply a policy: see ``Housekeeping.run``."""
        try:
            with span("housekeeping", trace, repository=self._uri):
                self._housekeeping.run(policy, bases)
        except Exception as error:
            self._errors.note(error)

    def export(self) -> None:
        """Export the version that is due: see ``Exports.run``."""
        try:
            self.exports.run()
        except Exception as error:
            self._errors.note(error)

    def discard(self, attempts: Sequence[tuple[int, str]]) -> None:
        """Delete the objects of attempts that were given up."""
        for id, attempt in attempts:
            try:
                self._committer.discard(id, attempt)
            except RaystowError as error:
                log = about(logger, repository=self._uri, version=id, attempt=attempt)
                log.warning("objects of the abandoned attempt %d stay until the next collection: %s", id, error)
            except Exception as error:
                self._errors.note(error)
