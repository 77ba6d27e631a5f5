"""The rows of two versions that hold the same box of the same tensor, found while each manifest is read once."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator

from ..format.boxes import Box
from ..format.manifest import Chunk
from . import stored_manifest
from .version import Version


def matched_rows(before: Version, after: Version, names: Collection[str]) -> Iterator[tuple[Chunk, Chunk]]:
    """Yield pairs of rows of the named tensors, one of each version.

    Both are read in the order of ranks, which mostly have the same parts of tensors in both. So few rows wait for their
    counterpart. Of each version the newest ``KEPT`` wait, or those of one fragment, and an
    older one may have no pair here.
    """
    waiting: tuple[dict[tuple[str, Box], Chunk], ...] = {}, {}
    for _, side, rows in heapq.merge(_parts(before, 0), _parts(after, 1), key=lambda part: part[:2]):
        own, other = waiting[side], waiting[1 - side]
        for row in rows:
            if row.name in names:
                place = row.name, row.box
                found = other.pop(place, None)
                if found is None:
                    own[place] = row
                else:
                    yield (row, found) if side == 0 else (found, row)
        while len(own) > max(stored_manifest.KEPT, len(rows)):
            del own[next(iter(own))]


def _parts(version: Version, side: int) -> Iterator[tuple[int, int, tuple[Chunk, ...]]]:
    """The lowest rank of each fragment, ascending, the side, and the rows."""
    for info, fragment in version.walk(by_rank=True):
        yield min(info.ranks, default=0), side, fragment.chunks
