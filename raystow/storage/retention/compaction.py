"""Plans which differences are written whole, so that their bases can go."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..catalog import Catalog
from ..errors import StateError
from ..format.root import Entry
from ..invariants import Fence
from . import replacement
from .compaction_policy import as_it_is
from .replacement import Replacement
from .rewrite import Progress


@dataclass(frozen=True)
class CompactionPlan:
    """Differences to write whole.

    ``entries``: the versions, oldest first. ``kept``: other differences, each with the reason why it stays one. ``all``: the
    entries of the root that the plan was made for.
    """

    catalog: Catalog
    entries: tuple[Entry, ...]
    kept: Mapping[Entry, str]
    all: tuple[Entry, ...]

    def explain(self) -> list[str]:
        """Explain the plan.

        Returns:
            A line for each delta.
        """
        lines = {entry: f"written whole: needs {_versions(entry.bases)} now" for entry in self.entries}
        lines |= {entry: f"stays a difference: it {why}" for entry, why in self.kept.items()}
        return [f"version {e.id} (step {e.step}): {line}" for e, line in sorted(lines.items(), key=lambda item: item[0].id)]

    def replacement(self, entry: Entry) -> Replacement:
        """The replacement of one of ``entries``. Reads its record and manifest."""
        return replacement.plan(self.catalog, entry, replacement.compact(), siblings=self.all)

    def execute(self, fence: Fence | None = None, progress: Progress = lambda nbytes: None) -> tuple[Entry, ...]:
        """Write the versions one after another; their bases stay until retention drops them.

        Args:
            fence: The epoch that must be in charge.
            progress: Called with the bytes of each chunk that is written.

        Returns:
            The new entries of the root.

        Raises:
            RaystowError: See ``Replacement.execute``. What was written by then stays; the next plan finds the rest.
        """
        done = (self.replacement(entry).execute(fence, progress) for entry in self.entries)
        return tuple(entry for entry in done if entry is not None)


def plan(catalog: Catalog, ids: Collection[int] | None) -> CompactionPlan:
    """See ``Repository.plan_compaction``."""
    root = catalog.root()
    if lost := set(ids or ()) - {entry.id for entry in root.versions}:
        raise StateError(f"there is no version {min(lost)}", subject=catalog.uri, remedy="`raystow ls` lists what there is")
    stays = as_it_is(root.versions, root.verified, catalog.leased())
    named = [entry for entry in root.versions if entry.bases and (ids is None or entry.id in ids)]
    chosen = tuple(entry for entry in named if entry.id not in stays)
    return CompactionPlan(catalog, chosen, {entry: stays[entry.id] for entry in named if entry.id in stays}, root.versions)


def _versions(ids: Collection[int]) -> str:
    return ", ".join(f"version {id}" for id in ids)
