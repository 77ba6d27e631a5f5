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

    ``table`` is set by ``compute_tables``: int64 [5, streams], the rows are the address of each stream, the aligned address that
    it is moved to, its size, and the address and the size of its decoded bytes.
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

    def consecutive(starts: _Numbers, sizes: _Numbers) -> _Numbers:
        """Return the address of each stream if those of a plane are consecutive."""
        ends = np.cumsum(sizes)
        return np.repeat(starts - (ends - sizes)[first], counts) + ends - sizes

    length = np.repeat(lengths, counts)
    before = (np.arange(len(sizes)) - np.repeat(first, counts)) * length  # decoded bytes of earlier streams of the plane
    decoded = np.minimum(length, np.repeat(nbytes, counts) - before)
    places = consecutive(sources, sizes), consecutive(starts, aligned(sizes))
    table = np.stack((*places, sizes, np.repeat(targets, counts) + before, decoded))
    ends = np.cumsum([sum(map(len, streams.sizes)) for streams in several])
    for streams, part in zip(several, np.split(table, ends[:-1], axis=1), strict=True):
        streams.table = part
