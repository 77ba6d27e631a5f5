"""Linking: a thinned version that is whole is written as the difference to another. No bit of it changes.

It is written once more, and replaced; see ``replacing``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..format.root import Root
from . import rewriting
from .replacing import Replacement, signer

if TYPE_CHECKING:
    from ..repository import Repository


@dataclass(frozen=True)
class Linking(Replacement):
    """One version, to become a difference to one before it; not if it was pinned or verified."""

    @property
    def needed(self) -> bool:
        """Whether it is whole."""
        return not self.version.entry.bases

    def _may(self, root: Root) -> bool:
        return self.version.id not in {root.verified, *root.pins.values()}

    def _done(self) -> str:
        return "is a difference now"


def plan(repository: Repository, id: int, base: int) -> Linking | None:
    """What writing version ``id`` as a difference to ``base`` would read and write; None if these are not two versions of which
    no more than the weights is left, or the first is a difference. Reads its record and manifest.

    ``Untrusted`` if it is signed, or should be, and nobody here can sign what would take its place.
    """
    entries = {entry.id: entry for entry in repository.root().versions if not entry.resumable}
    if not {id, base} <= entries.keys() or entries[id].bases:
        return None
    version, former = (repository.at(entries[each]) for each in (id, base))
    made = rewriting.plan_onto(version, repository.store, former)
    return Linking(repository, version, made, signer(repository, version))
