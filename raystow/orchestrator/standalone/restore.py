"""Restores without a Ray cluster: each process reads from the store by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...state.tree import State
from ...storage.format import key_files
from ...storage.reading.version import Version
from ...storage.reading.version_selector import LATEST, VersionSelector
from ...storage.repository import Repository
from ..client.rank_discovery import placement, process_group
from ..restore.agreed import restore_agreed
from ..restore.agreement import LocalAgreement
from ..restore.name_patterns import NameRules
from ..restore.plan import Progress
from ..restore.planner import RestoreOptions


def restore(
    repository: Repository,
    into: State,
    version: VersionSelector = LATEST,
    *,
    strict: bool = True,
    allow_missing: str | Sequence[str] = (),
    allow_unused: str | Sequence[str] = (),
    cast: bool = False,
    progress: Progress | None = None,
) -> Version | None:
    """See ``raystow.restore``."""
    names = NameRules.of(strict, allow_missing, allow_unused)
    rank, world_size = process_group() or placement()  # a replica group of torchft is a world of its own: see placement
    agreement = LocalAgreement(repository, version, fall_back=world_size == 1)
    return restore_agreed(repository, into, agreement, RestoreOptions(rank, world_size, names, cast), progress=progress)


def restore_version(version: Version, into: State, **options: Any) -> None:
    """See ``Version.restore``."""
    repository = Repository(version.store, version.repository_id, trust=version.trust or key_files.trust())
    restore(repository, into, version, **options)
