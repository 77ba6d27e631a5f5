"""Restores without a Ray cluster: each process reads from the store by itself."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...state.objects import ObjectTree
from ...state.tree import State
from ...storage.arguments import refused
from ...storage.format import key_files
from ...storage.repository import Repository, open_repository
from ...storage.versions.version import Version
from ...storage.versions.version_selector import LATEST, VersionSelector
from ..argument_checks import address
from ..client.rank_discovery import placement, process_group
from ..restore.agreed import restore_agreed
from ..restore.agreement import LocalAgreement
from ..restore.name_patterns import NameRules
from ..restore.plan import Progress
from ..restore.planner import RestoreOptions


def restore(
    source: str | os.PathLike[str] | Version,
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
    if isinstance(source, Version):
        if version != LATEST:
            raise refused("version", version, "left out if source is a Version, which is restored")
        repository = Repository(source.store, source.repository_id, trust=source.trust or key_files.trust())
        version = source
    else:
        repository = open_repository(address(source))
    names = NameRules.of(strict, allow_missing, allow_unused)
    rank, world_size = process_group() or placement()  # a replica group of torchft is a world of its own: see placement
    agreement = LocalAgreement(repository, version, fall_back=world_size == 1)
    objects, options = ObjectTree(into, what="into"), RestoreOptions(rank, world_size, names, cast)
    tree = objects.into()
    with objects.named():
        restored = restore_agreed(repository, tree, agreement, options, progress=progress)
    if restored is not None:
        objects.load(rank, world_size)
    return restored
