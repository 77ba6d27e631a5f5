"""Reads the tensors of two versions beside each other and counts what differs, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...storage.coding import dtypes
from ...storage.format.boxes import Box
from ...storage.reader import Request
from ..cutting import cuts
from ..shards import Shard
from ..state import Leaf
from .differences import Difference, What

if TYPE_CHECKING:
    from ...storage.coding.dtypes import DType
    from ...storage.format.manifest import Chunk
    from ...storage.version import Version

SLAB = 64 << 20
"""Bytes of each version that are decoded into memory before they are compared; more only where one chunk has more."""

_BLOCK = 1 << 20  # elements that are compared at a time: temporaries stay small

Words = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Deviation:
    """Of a part of a tensor: ``elements`` that differ, the ``largest`` absolute difference of floats among them, and how many of
    these have none (``undefined``)."""

    elements: int = 0
    largest: float | None = None
    undefined: int = 0

    def __add__(self, other: Deviation) -> Deviation:
        known = [one.largest for one in (self, other) if one.largest is not None]
        return Deviation(self.elements + other.elements, max(known, default=None), self.undefined + other.undefined)


def compare(before: Version, after: Version, found: Sequence[Difference], progress: Callable[[int], None]) -> list[Difference]:
    """``found``, with what the bytes tell of all that are ``comparable``. ``progress`` is told the bytes that were compared, as
    many as ``work`` says in all. ``Damaged`` names what does not match its digest."""
    sums: dict[str, Deviation] = {}
    for slab in _slabs(after, found):
        old, new = _read(before, slab), _read(after, slab)
        end = 0
        for one, _, nbytes in slab:
            part = slice(end, end + nbytes)
            deviation = deviate(old[part], new[part], dtypes.dtype(one.dtype))
            sums[one.name] = sums.get(one.name, Deviation()) + deviation
            end += nbytes
        progress(end)
    return [_settled(one, sums.get(one.name, Deviation())) if one.comparable else one for one in found]


def work(found: Sequence[Difference]) -> int:
    """Raw bytes of each version that ``compare`` compares."""
    return sum(one.weight for one in found if one.comparable)


def deviate(old: Words, new: Words, format: DType) -> Deviation:
    """Compare two arrays of as many bytes, element by element, by their bits: NaN equals the same NaN, and 0 differs from -0."""
    word, step = np.dtype(f"u{min(format.itemsize, 8)}"), _BLOCK * format.itemsize
    total = Deviation()
    for start in range(0, old.size, step):
        a, b = old[start : start + step], new[start : start + step]
        pairs = (part.view(word).reshape(-1, format.itemsize // word.itemsize) for part in (a, b))
        differ = np.logical_or.reduce(np.not_equal(*pairs), axis=1)
        if count := int(np.count_nonzero(differ)):
            distance = _distance(_floats(a, format)[differ], _floats(b, format)[differ]) if format.is_float else (None, 0)
            total += Deviation(count, *distance)
    return total


def _floats(raw: Words, format: DType) -> Words:
    """One row for each element, with its one or (of a complex number) two floats."""
    names = {8: "float64", 4: "float32", 2: "float16", 1: format.name}
    kind = dtypes.to_numpy("bfloat16" if format.name == "bfloat16" else names[format.width])
    return raw.view(kind).reshape(-1, format.itemsize // format.width)


def _distance(a: Words, b: Words) -> tuple[float | None, int]:
    with np.errstate(all="ignore"):
        apart = np.abs(b.astype(np.float64) - a.astype(np.float64)).max(axis=1)
    finite = np.isfinite(apart)
    return (float(apart[finite].max()) if finite.any() else None), int(apart.size - np.count_nonzero(finite))


def _slabs(after: Version, found: Sequence[Difference]) -> Iterator[list[tuple[Difference, Box, int]]]:
    """The boxes to compare, in lists that fit a slab together."""
    slab: list[tuple[Difference, Box, int]] = []
    used = 0
    for one in found:
        if not one.comparable:
            continue
        itemsize = dtypes.dtype(one.dtype).itemsize
        for box in _boxes(one, after.chunks[one.name]):
            nbytes = math.prod(box[1]) * itemsize
            if slab and used + nbytes > SLAB:
                yield slab
                slab, used = [], 0
            slab.append((one, box, nbytes))
            used += nbytes
    if slab:
        yield slab


def _boxes(one: Difference, rows: Sequence[Chunk]) -> Iterator[Box]:
    """The changed chunks; where versions have other chunks, boxes of whole rows, as neither version's chunks fit the other's."""
    if one.boxes is not None:
        yield from one.boxes
        return
    shape = rows[0].shape
    whole = Shard(Leaf((), one.name, None, True), rows[0].kind, one.dtype, shape, (0,) * len(shape), shape, (), 0, None)
    yield from (box for box, nbytes, _ in cuts(whole, SLAB) if nbytes)


def _read(version: Version, slab: Sequence[tuple[Difference, Box, int]]) -> Words:
    buffer = np.empty(sum(nbytes for _, _, nbytes in slab), np.uint8)
    requests, end = [], 0
    for one, box, nbytes in slab:
        target = buffer[end : end + nbytes].view(f"V{dtypes.dtype(one.dtype).itemsize}").reshape(box[1])
        rows: Sequence[Chunk] = version.chunks[one.name]
        if one.boxes is not None:
            rows = [row for row in rows if row.offset == box[0]]
        requests.append(Request(one.name, rows, box, target))
        end += nbytes
    version.reader().fill(requests)
    return buffer


def _settled(one: Difference, deviation: Deviation) -> Difference:
    return replace(
        one,
        what=What.CHANGED if deviation.elements else What.SAME,
        changed=deviation.elements * dtypes.dtype(one.dtype).itemsize,
        elements=deviation.elements,
        largest=deviation.largest,
        undefined=deviation.undefined,
    )
