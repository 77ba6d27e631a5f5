"""Which versions become differences as they are thinned, each to the one before it: pure, as ``policy`` is.

Weights change least from one version to the next. So a chain, each to the one just before, takes less than a star, all to the
same one; and old weights are read seldom enough for a read to go through some versions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..chains import depths
from ..format.root import Entry

MOST = 6
"""Differences in a row. Weights at the end of so many must not take more than twice the time of a whole version with all that it
resumes from; four more would spare four bytes of a hundred, and take three times as long as it does."""


def chained(entries: Sequence[Entry], thin: Collection[int], ruled: Collection[int], most: int) -> dict[int, int]:
    """Ids of ``thin`` that are to be differences, each with the id of the version that it is to be one to: the one before it of
    which no more than weights stay. Those left out are to be whole. ``entries``: those of the root, whose ids ascend. ``ruled``:
    ids of those that a rule keeps: nothing else is taken for a base, so that none is kept for longer than it must be. ``most``:
    differences in a row at most, those to it that there are already among them.
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
    """How many differences in a row lead to each version and stay what they are."""
    found = {entry.id: 0 for entry in entries}
    for entry in reversed(entries):
        if entry.id not in thin:
            for base in entry.bases:
                found[base] = max(found.get(base, 0), found[entry.id] + 1)
    return found
