"""Compaction: a version that is a difference to another is written whole, so that the other can go. No bit of it changes.

It is written once more, and replaced; see ``replacing``. Boxes, ids and digests of elements stay, so what is a difference to it
in turn is none the wiser.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import StateError
from ..format.root import Entry, Root
from . import rewriting
from .freeing import as_it_is, estimate
from .replacing import Replacement, signer
from .rewriting import Progress

if TYPE_CHECKING:
    from ..repository import Repository


@dataclass(frozen=True)
class Compaction(Replacement):
    """One version, to be written whole; not if it is the newest, which a restore may be about to take, or was verified last."""

    @property
    def needed(self) -> bool:
        """Whether it is a difference."""
        return bool(self.version.record.bases)

    @property
    def stored(self) -> int:
        """About how many stored bytes come of it."""
        bases = [base.entry for base in self.version.bases.all()]
        return max((estimate(self.version.entry, base) for base in bases), default=self.version.bytes)

    def _may(self, root: Root) -> bool:
        return self.version.id not in (root.verified, root.versions[-1].id)

    def _done(self) -> str:
        return "is no difference any more"


def plan(repository: Repository, entry: Entry, *, beside: Sequence[Entry] = ()) -> Compaction:
    """What writing a version whole would read and write. Reads its record and manifest. ``beside``: see ``Version``.

    ``Untrusted`` if it is signed, or should be, and nobody here can sign what would take its place.
    """
    version = repository.at(entry, beside=beside)
    return Compaction(repository, version, rewriting.plan_onto(version, repository.store, None), signer(repository, version))


@dataclass(frozen=True)
class CompactionPlan:
    """``entries``: the versions to write whole, oldest first. ``kept``: other differences, each with why it stays one. ``all``:
    those of the root that it was made for."""

    repository: Repository
    entries: tuple[Entry, ...]
    kept: Mapping[Entry, str]
    all: tuple[Entry, ...]

    def explain(self) -> list[str]:
        """A line for each difference."""
        lines = {entry: f"written whole: needs {_versions(entry.bases)} now" for entry in self.entries}
        lines |= {entry: f"stays a difference: it {why}" for entry, why in self.kept.items()}
        return [f"version {e.id} (step {e.step}): {line}" for e, line in sorted(lines.items(), key=lambda item: item[0].id)]

    def compaction(self, entry: Entry) -> Compaction:
        """How to write one of ``entries`` whole. Reads its record and manifest."""
        return plan(self.repository, entry, beside=self.all)

    def execute(
        self, check: Callable[[Root], None] = lambda root: None, progress: Progress = lambda nbytes: None
    ) -> tuple[Entry, ...]:
        """Write them, one after another; the root's new entries. What they needed stays until retention drops it.

        Raises what ``Compaction.execute`` raises; what is whole by then stays so, and the next plan finds the rest.
        """
        done = (self.compaction(entry).execute(check, progress) for entry in self.entries)
        return tuple(entry for entry in done if entry is not None)


def plan_of(
    repository: Repository, root: Root, ids: Collection[int] | None, leased: Collection[tuple[int, str]]
) -> CompactionPlan:
    """What of the versions ``ids``, None for all, can be written whole. ``StateError`` for one that is not there."""
    if lost := set(ids or ()) - {entry.id for entry in root.versions}:
        raise StateError(f"there is no version {min(lost)}", subject=repository.uri, remedy="`raystow ls` lists what there is")
    stays = as_it_is(root.versions, root.verified, leased)
    wanted = [entry for entry in root.versions if entry.bases and (ids is None or entry.id in ids)]
    chosen = tuple(entry for entry in wanted if entry.id not in stays)
    kept = {entry: stays[entry.id] for entry in wanted if entry.id in stays}
    return CompactionPlan(repository, chosen, kept, root.versions)


def _versions(ids: Collection[int]) -> str:
    return ", ".join(f"version {id}" for id in ids)
