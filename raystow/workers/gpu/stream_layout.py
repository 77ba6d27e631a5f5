"""Where the coded streams of very many planes lie in device memory, and where each goes: a few operations of numpy for all."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ...storage.coding.chunk import Plane, Sizes
from .nvcomp import ALIGN

_Number = TypeVar("_Number", int, np.ndarray[Any, Any])


@dataclass
class Streams:
    """Coded streams of one kind, plane by plane; each but a plane's last decodes to ``length`` bytes.

    ``table``: once they are worked out, int64 [5, streams]: where each lies, where it goes so that nvCOMP takes it, its size,
    where it is decoded to, and its room there.
    """

    length: int
    planes: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    sizes: list[Sizes] = field(default_factory=list)
    table: np.ndarray[Any, Any] = field(default_factory=lambda: np.empty((5, 0), np.int64))

    def add(self, plane: Plane, source: int, start: int, target: int, nbytes: int) -> int:
        """The streams of a plane that lie at ``source``, go to ``start``, and are decoded to ``nbytes`` at ``target``; the bytes
        that they take from ``start`` on."""
        count = len(plane.sizes)
        self.planes.append((source, start, target, nbytes, count, self.length))
        self.sizes.append(plane.sizes)
        return spread(plane.size, count)


def spread(nbytes: int, count: int) -> int:
    """Bytes that so many streams, of ``nbytes`` together, may take where nvCOMP wants them."""
    return aligned(nbytes) + count * ALIGN


def aligned(nbytes: _Number) -> _Number:
    """The next multiple of a power of two."""
    return (nbytes + ALIGN - 1) & -ALIGN


def work_out(several: Collection[Streams]) -> None:
    """Fill in the tables of all, at once."""
    planes = [plane for streams in several for plane in streams.planes]
    if not planes:
        return
    sources, starts, targets, nbytes, counts, lengths = np.array(planes, np.int64).T
    first = np.cumsum(counts) - counts
    sizes = np.concatenate([sizes for streams in several for sizes in streams.sizes], dtype=np.int64)

    def behind(starts: Any, sizes: Any) -> Any:
        """Where each is, if those of a plane lie one behind the other."""
        ends = np.cumsum(sizes)
        return np.repeat(starts - (ends - sizes)[first], counts) + ends - sizes

    length = np.repeat(lengths, counts)
    decoded = (np.arange(len(sizes)) - np.repeat(first, counts)) * length  # of a plane before each
    rooms = np.minimum(length, np.repeat(nbytes, counts) - decoded)
    table = np.stack((behind(sources, sizes), behind(starts, aligned(sizes)), sizes, np.repeat(targets, counts) + decoded, rooms))
    ends = np.cumsum([sum(map(len, streams.sizes)) for streams in several])
    for streams, part in zip(several, np.split(table, ends[:-1], axis=1), strict=True):
        streams.table = part
