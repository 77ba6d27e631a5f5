"""Commits a version in the process that saves: takes an epoch for each process and repository."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Mapping, Sequence

from ..._version import __version__
from ...state.coverage import total
from ...storage.commit.committer import Committer
from ...storage.errors import NotARepository, SaveFailed
from ...storage.format import key_files, values
from ...storage.repository import create_repository
from ...storage.retention.policy import Policy
from ...storage.runtime.clock import SYSTEM
from ...storage.runtime.spans import Span, span
from ...storage.versions.version import Version
from ...workers.protocol.messages import Ticket
from ..client.provenance import Provenance
from ..coordinator.attempt import Attempt, version_record
from ..coordinator.housekeeping import Housekeeping
from .writer import StoredPart

_lock = threading.Lock()
_committers: dict[tuple[int, str], Committer] = {}  # by process, which may have been forked


def committer_of(uri: str) -> Committer:
    """This process's committer for a repository, which is created if it does not exist, or not any more.

    All saves of the process share it: an epoch for each save would fence an asynchronous save in flight, and a process that is
    thought dead would take over again with its next save.
    """
    with _lock:
        here = os.getpid(), uri
        if here not in _committers or _is_outdated(_committers[here]):
            signer = key_files.signer()
            owner = f"direct-{platform.node()}-{SYSTEM.token()}"
            _committers[here] = Committer(create_repository(uri, signer=signer), owner, signer)
        return _committers[here]


def _is_outdated(committer: Committer) -> bool:
    try:
        root = committer.catalog.root()
        committer.notice(root)
        return committer.outdated(root)
    except NotARepository:
        return True


class StandaloneCommit:
    """One attempt to make a version. ``step``: None for one more than that of the newest version. ``attempt``: its name, 16
    random hexadecimal digits; None chooses one."""

    def __init__(self, uri: str, step: int | None, attempt: str | None = None) -> None:
        self._committer = committer_of(uri)
        self.repository = self._committer.catalog
        if step is None:
            versions = self._committer.root.versions
            step = versions[-1].step + 1 if versions else 0
        self.step = step
        with _lock:
            self.id, reserved = self._committer.reserve()
        self.attempt = attempt or reserved
        self._span = Span("save", version=self.id, step=self.step)

    def ticket(self, rank: int, timeout: float) -> Ticket:
        """Return what a rank stores its part with."""
        return Ticket(self.id, self.attempt, rank, timeout, self.step, trace=self._span.trace)

    def commit(
        self, parts: Sequence[StoredPart], expected: int, metrics: Mapping[str, object], writer: Mapping[str, str] | None = None
    ) -> Version:
        """Make the version. ``expected``: the sum of ``coverage`` over all tensors. ``writer``: further software to record."""
        try:
            with span("save.commit", self._span.trace, repository=self.repository.uri, version=self.id):
                version = self._commit(parts, expected, metrics, writer or {})
        except BaseException as error:
            self._span.end(error or repr(error))
            raise
        self._span.end(ranks=len(parts))
        return version

    def _commit(
        self, parts: Sequence[StoredPart], expected: int, metrics: Mapping[str, object], writer: Mapping[str, str]
    ) -> Version:
        if total(part.covered for part in parts) != expected:
            what = "the stored data of the ranks does not add up to whole tensors"
            remedy = "save on every rank that has a part of them"
            raise SaveFailed(what, subject=f"save of step {self.step}", remedy=remedy)
        texts = {name: values.dumps(value) for name, value in metrics.items()}
        attempt = Attempt(self.id, self.attempt, self.step, len(parts), metrics={0: texts})
        attempt.describe(0, Provenance(0).texts(None))
        software = {"raystow": __version__, "python": platform.python_version(), **writer}
        fragments = {number: part.info for number, part in enumerate(parts)}
        record = version_record(self._committer, attempt, fragments, created=SYSTEM.now(), writer=software)
        return self._committer.commit(record)

    def apply_retention(self, policy: Policy) -> None:
        Housekeeping(self._committer).run(policy)
