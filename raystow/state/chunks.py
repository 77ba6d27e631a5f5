"""Cuts shards into boxes of limited size, each of which becomes a chunk."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

from ..storage.format.boxes import Box
from .shards import Shard


class Cut(NamedTuple):
    """A box in the coordinates of a shard. ``start``: its first byte in the shard, if the shard is contiguous."""

    box: Box
    nbytes: int
    start: int


def cuts(shard: Shard, limit: int) -> tuple[Cut, ...]:
    """Cut a shard into boxes of at most ``limit`` bytes, each contiguous in row-major order. An empty shard has none, unless
    the tensor itself is empty: it has a single empty box, so that the manifest names it."""
    if 0 in shard.extent:
        return (Cut(((0,) * len(shard.extent), shard.extent), 0, 0),) if 0 in shard.shape else ()
    return cuts_of_extent(shard.extent, shard.itemsize, limit)


@functools.lru_cache(maxsize=4096)
def cuts_of_extent(extent: tuple[int, ...], itemsize: int, limit: int) -> tuple[Cut, ...]:
    """Cut a box that is not empty, like ``cuts``."""
    whole = len(extent)  # dimensions from here on are not cut
    row = itemsize
    while whole and row * extent[whole - 1] <= limit:
        whole -= 1
        row *= extent[whole]
    if not whole:
        return (Cut(((0,) * len(extent), extent), row, 0),)
    step, cut, end, found = max(1, limit // row), whole - 1, 0, list[Cut]()
    for outer in itertools.product(*(range(n) for n in extent[:cut])):
        for start in range(0, extent[cut], step):
            rows = min(step, extent[cut] - start)
            box = (*outer, start, *(0,) * (len(extent) - whole)), (*(1,) * cut, rows, *extent[whole:])
            found.append(Cut(box, rows * row, end))
            end += rows * row
    return tuple(found)
