"""Computes the addresses of the coded streams of many planes in device memory, in a few numpy operations for all."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ...storage.coding.chunk import Plane, Sizes
from .nvcomp import ALIGN

_Numbers = npt.NDArray[np.int64]
_Number = TypeVar("_Number", int, _Numbers)


@dataclass
class Streams:
    """Coded streams with one codec, plane by plane; each stream but a plane's last decodes to ``length`` bytes.

    ``table`` is set by ``compute_tables``: int64 [5, streams], the rows are the address and the size of each stream, those of its
    decoded bytes, and the aligned address that it is moved to.
    """

    length: int
    planes: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    sizes: list[Sizes] = field(default_factory=list)
    table: _Numbers = field(default_factory=lambda: np.empty((5, 0), np.int64))

    def add(self, plane: Plane, source: int, start: int, target: int, nbytes: int) -> int:
        """Add the streams of a plane: moved from ``source`` to ``start``, decoded to ``nbytes`` bytes at ``target``. Return the
        bytes that they need at ``start``."""
        count = len(plane.sizes)
        self.planes.append((source, start, target, nbytes, count, self.length))
        self.sizes.append(plane.sizes)
        return spread(plane.size, count)


def spread(nbytes: int, count: int) -> int:
    """Return the bytes that ``count`` streams of ``nbytes`` in total may need once each is aligned."""
    return aligned(nbytes) + count * ALIGN


def aligned(nbytes: _Number) -> _Number:
    """Round up to a multiple of ``ALIGN``."""
    return (nbytes + ALIGN - 1) & -ALIGN


def compute_tables(several: Collection[Streams]) -> None:
    """Set the tables of all."""
    planes = [plane for streams in several for plane in streams.planes]
    if not planes:
        return
    sources, starts, targets, nbytes, counts, lengths = np.array(planes, np.int64).T
    first = np.cumsum(counts) - counts
    sizes = np.concatenate([sizes for streams in several for sizes in streams.sizes], dtype=np.int64)
    before, moved = _before(sizes), _before(aligned(sizes))
    earlier = first * lengths  # what all streams of earlier planes decoded to, if they had this length
    of_plane = sources - before[first], targets - earlier, nbytes + earlier, lengths, starts - moved[first]
    source, target, left, length, start = np.repeat(np.stack(of_plane), counts, axis=1)
    earlier = np.arange(len(sizes)) * length
    table = np.stack((source + before, sizes, target + earlier, np.minimum(length, left - earlier), start + moved))
    ends = np.cumsum([sum(map(len, streams.sizes)) for streams in several])
    for streams, part in zip(several, np.split(table, ends[:-1], axis=1), strict=True):
        streams.table = part


def _before(sizes: _Numbers) -> _Numbers:
    """Return where each begins if they are consecutive."""
    begins: _Numbers = np.cumsum(sizes) - sizes
    return begins
