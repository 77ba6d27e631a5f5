"""Which versions become deltas as they are thinned. Pure, as ``policy``.

Weights change least from one version to the next. So a chain takes fewer bytes than deltas that share one base, and old weights
are read seldom enough for a read to go through several versions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..format.root import Entry
from ..root.delta_chain import depths

MOST = 6
"""Deltas in a row. Weights behind 6 are read in less than twice the time of a complete version; 10 would save 4 % of the bytes
and take three times as long."""


def chained(entries: Sequence[Entry], thin: Collection[int], ruled: Collection[int], most: int) -> dict[int, int]:
    """The base of each thinned version, by id: the one before it that keeps its weights only. Those left out become whole.

    ``entries``: of the root, ids ascending. ``thin``: ids of the versions to thin. ``ruled``: ids that a rule keeps: only these
    become bases, so that no other is kept for longer. ``most``: deltas in a row, with those that lead to the version already.
    """
    above = _above(entries, thin)
    below = {id: depth - 1 for id, depth in depths(entries).items()}
    found: dict[int, int] = {}
    before: int | None = None
    for entry in entries:
        if entry.id in thin:
            below[entry.id] = 0
            if before is not None and below[before] + 1 + above[entry.id] <= most:
                found[entry.id], below[entry.id] = before, below[before] + 1
        elif not entry.resumable:
            below[entry.id] = 1 + max((below.get(base, 0) for base in entry.bases), default=-1)
        if entry.id in ruled and (entry.id in thin or not entry.resumable):
            before = entry.id
    return found


def _above(entries: Sequence[Entry], thin: Collection[int]) -> dict[int, int]:
    """The number of deltas in a row that lead to each version and stay as they are."""
    found = {entry.id: 0 for entry in entries}
    for entry in reversed(entries):
        if entry.id not in thin:
            for base in entry.bases:
                found[base] = max(found.get(base, 0), found[entry.id] + 1)
    return found
