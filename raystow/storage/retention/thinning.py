"""Thinning: a version keeps its id and its weights, and lets go of what only resuming needs. It cannot be undone.

It is written once more without the rest, and replaced; see ``replacing``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..format.groups import WEIGHTS, group
from ..format.root import Entry, Root
from ..format.version_record import Thinned, VersionRecord
from . import rewriting
from .replacing import Replacement, signer

if TYPE_CHECKING:
    from ..repository import Repository


@dataclass(frozen=True)
class Thinning(Replacement):
    """One version, to be left with its weights; not if it was pinned or verified, is among the newest again, or another is a
    difference to it. ``resumable``: as many newer versions must hold all that was saved."""

    resumable: int

    def _may(self, root: Root) -> bool:
        id = self.version.id
        newer = [other for other in root.versions if other.id > id and other.resumable]
        kept = {root.verified, *root.pins.values()}
        kept |= {base for other in root.versions if other.resumable for base in other.bases}  # a thinned one needs weights only
        return id not in kept and len(newer) >= self.resumable

    def _changed(self, record: VersionRecord, now: float) -> VersionRecord:
        return replace(record, thinned=Thinned(self.version.attempt, now, (WEIGHTS,)))

    def _done(self) -> str:
        return "holds its weights only"


def plan(repository: Repository, entry: Entry, resumable: int) -> Thinning:
    """What thinning a version would read and write. Reads its record and manifest.

    ``Untrusted`` if it is signed, or should be, and nobody here can sign what would take its place.
    """
    version = repository.at(entry)
    kept = rewriting.plan(version, repository.store, _stays)
    return Thinning(repository, version, kept, signer(repository, version), resumable)


def plan_chained(repository: Repository, entry: Entry, resumable: int, base: Entry | None) -> Thinning:
    """The same for one whose weights become a difference to those of ``base``, or whole without one."""
    version = repository.at(entry)
    former = repository.at(base) if base is not None else None
    kept = rewriting.plan_onto(version, repository.store, former, _stays)
    return Thinning(repository, version, kept, signer(repository, version), resumable)


def _stays(name: str) -> bool:
    return group(name) == WEIGHTS
