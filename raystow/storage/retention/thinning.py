"""Thinning: a version keeps its id and its weights, and lets go of what only resuming needs. It cannot be undone.

It is written once more without the rest, and replaced; see ``replacing``. Where it rounds weights, no difference may lean on them
that was made before. So what is to be a difference to it is written whole when it is its turn, and as a difference once this one
is what it will be.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import Damaged
from ..format.groups import WEIGHTS, group
from ..format.root import Entry, Root
from ..format.version_record import Thinned, VersionRecord
from ..log import about
from . import linking, rewriting
from .replacing import Check, Replacement, signer
from .rewriting import Progress

if TYPE_CHECKING:
    from ..repository import Repository


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Thinning(Replacement):
    """One version, to be left with its weights; not if it was pinned or verified, is among the newest again, or another is a
    difference to it. ``resumable``: as many newer versions must hold all that was saved. ``bits``: see ``Policy.mantissa_bits``.
    ``users``: ids of thinned versions that become differences to it afterwards."""

    resumable: int
    bits: int | None = None
    users: Sequence[int] = ()

    @property
    def needed(self) -> bool:
        """Whether it was not thinned before. Also one that never held more than weights is written again: the root says then that
        it holds no more, and the next plan counts it as what it is."""
        return self.version.resumable

    def execute(self, check: Check = lambda root: None, progress: Progress = lambda nbytes: None) -> Entry | None:
        new = super().execute(check, progress)
        for id in self.users if new is not None else ():
            try:
                if (link := linking.plan(self.repository, id, self.version.id)) is not None:
                    link.execute(check)
            except Damaged as error:
                log = about(logger, repository=self.repository.uri, version=id)
                log.warning("version %d stays whole, and is no difference to version %d: %s", id, self.version.id, error)
        return new

    def _may(self, root: Root) -> bool:
        id = self.version.id
        newer = [other for other in root.versions if other.id > id and other.resumable]
        kept = {root.verified, *root.pins.values()}
        # A thinned one needs the weights only, bit for bit.
        kept |= {base for other in root.versions if other.resumable or self.bits is not None for base in other.bases}
        return id not in kept and len(newer) >= self.resumable

    def _changed(self, record: VersionRecord, now: float) -> VersionRecord:
        return replace(record, thinned=Thinned(self.version.attempt, now, (WEIGHTS,), self.bits))

    def _done(self) -> str:
        return "holds its weights only"


def plan(repository: Repository, entry: Entry, resumable: int, *, beside: Sequence[Entry] = ()) -> Thinning:
    """What thinning a version would read and write. Reads its record and manifest. ``beside``: see ``Version``.

    ``Untrusted`` if it is signed, or should be, and nobody here can sign what would take its place.
    """
    version = repository.at(entry, beside=beside)
    kept = rewriting.plan(version, repository.store, _stays)
    return Thinning(repository, version, kept, signer(repository, version), resumable)


def plan_anew(
    repository: Repository,
    entry: Entry,
    resumable: int,
    base: Entry | None,
    bits: int | None = None,
    users: Sequence[int] = (),
    *,
    beside: Sequence[Entry] = (),
) -> Thinning:
    """The same for one whose weights become a difference to those of ``base``, or whole without one. ``bits``, ``users``: see
    ``Thinning``."""
    version = repository.at(entry, beside=beside)
    former = repository.at(base, beside=beside) if base is not None else None
    kept = rewriting.plan_onto(version, repository.store, former, _stays, bits)
    return Thinning(repository, version, kept, signer(repository, version), resumable, bits, users)


def _stays(name: str) -> bool:
    return group(name) == WEIGHTS
