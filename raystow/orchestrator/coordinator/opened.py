"""A repository as its coordinator has it open: all that is known of it, from the first call until it is gone."""

from __future__ import annotations

import functools
import platform
from collections.abc import Collection

from ..._version import __version__
from ...storage.commit.committer import Committer
from ...storage.errors import Fenced, NotARepository, NotFound, RaystowError, StoreError
from ...storage.format import key_files
from ...storage.repository import create_repository
from ...storage.root.root_register import BEGIN_ANEW
from ...storage.runtime import metrics
from ...storage.runtime.clock import SYSTEM
from ...storage.stores import open_store
from ...storage.stores.settings import JobSettings
from .. import ray_cluster
from ..journal.rounds import JournalRounds
from ..restore.rounds import RestoreRounds
from ..restore.version_cache import VersionCache
from .attempts import Coordinator
from .restored_replicas import RestoredReplicas
from .segments import Segments
from .upkeep import Upkeep

REPLACED = "a repair or a backup has replaced the root"
"""What is said of a root that does not continue the one of this epoch."""


class OpenedRepository:
    """Opens the repository, or makes it, and takes its next epoch.

    Args:
        uri: Its address.
        settings: Those of its store.
        owner: See ``Committer``.
        abandoned: See ``create_repository``.
    """

    def __init__(self, uri: str, settings: JobSettings, owner: str, abandoned: Collection[tuple[int, str]] = ()) -> None:
        self._began, signer = SYSTEM.now(), key_files.signer()
        repository = create_repository(open_store(uri, settings=settings.given), signer=signer, abandoned=abandoned)
        self.committer = Committer(repository, owner, signer)
        self.known = VersionCache(repository, on_read=self.committer.notice)
        self.known.root()  # cached while the store answers
        writer = {"raystow": __version__, "ray": ray_cluster.VERSION, "python": platform.python_version()}
        self.core = Coordinator(self.committer, SYSTEM, writer=writer)
        count_damage = functools.partial(metrics.record, metrics.DAMAGED, repository=uri)
        current = self.committer.is_current
        self.rounds = RestoreRounds(
            repository, SYSTEM, self.known, is_current=current, on_fall_back=count_damage, member=self.core.members.get
        )
        self.replays = JournalRounds(SYSTEM, lambda: self.committer.rollbacks)
        self.restored = RestoredReplicas(SYSTEM)
        self.segments = Segments(self.committer, SYSTEM)
        self.upkeep = Upkeep(self.committer, settings)

    @property
    def changes(self) -> tuple[int, ...]:
        """The number of changes that a waiting call may wait for."""
        return self.core.changes, self.rounds.changes, self.replays.changes, self.restored.changes

    @property
    def in_use(self) -> bool:
        """Whether it has something in progress, or in memory, that another coordinator would not find."""
        parts = (self.core, self.rounds, self.replays, self.segments)
        return self.upkeep.due is not None or self.upkeep.exports.waiting or any(part.in_use for part in parts)

    @property
    def has_commit(self) -> bool:
        """Whether a save or a segment is complete."""
        return self.core.next_commit() is not None or self.segments.next_commit() is not None

    def gone(self, *, in_use: bool) -> RaystowError | None:
        """Why the repository is not the one that was opened; None if it is, or if the store does not answer. ``Fenced`` if a
        repair or a backup has replaced the root while it is ``in_use``: the next epoch must be taken then."""
        try:
            root = self.committer.catalog.root()
        except NotARepository as error:
            return error
        except (NotFound, StoreError):
            return None
        if not self.committer.outdated(root):
            return None
        uri = self.committer.catalog.uri
        return Fenced(REPLACED, subject=uri) if in_use else NotARepository(REPLACED, subject=uri, remedy=BEGIN_ANEW)

    def give_up(self, error: RaystowError) -> None:
        """End all saves and restores in progress, and forget what is in memory only."""
        self.core.give_up(error)
        self.rounds.give_up(error)

    def measure(self) -> None:
        """Set the gauges again: Ray drops them after some seconds."""
        newest, uri, root = self.known.newest, self.committer.catalog.uri, self.committer.root
        if newest is not None and newest.raw:
            metrics.record(metrics.RATIO, newest.stored / newest.raw, repository=uri)
        metrics.record(metrics.NEWEST, self._began if newest is None else newest.created, repository=uri)
        if durable := [*(entry.step for entry in root.versions[-1:]), *(segment.step for segment in root.segments)]:
            metrics.record(metrics.DURABLE_STEP, max(durable), repository=uri)
        metrics.record(metrics.OPEN, sum(not attempt.phase.over for attempt in self.core.attempts), repository=uri)
        metrics.record(metrics.ABORTED_IN_A_ROW, self.core.aborted_in_a_row, repository=uri)
