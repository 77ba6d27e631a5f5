"""Compares two versions: by the digests in their manifests, which reads no pack, and by their bytes, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

from ..orchestrator.export.slabs import TensorBox, boxes_of, read_slab
from ..orchestrator.export.version_files import value_texts
from ..storage.coding import dtypes
from ..storage.coding.dtypes import DType
from ..storage.coding.kernels import Bytes
from ..storage.format.boxes import Box
from ..storage.format.manifest import Chunk
from ..storage.runtime.batches import batches
from ..storage.versions.version import Version
from .output import dimensions

SLAB = 64 << 20
"""Bytes of each version that are decoded into memory at a time; more only where one chunk has more."""

_BLOCK = 1 << 20  # elements that are compared at a time, so that temporaries stay small


class Change(str, Enum):
    """What happened to a tensor. ``LAYOUT``: its chunks have other boxes, or their elements are stored in another way, so only
    its bytes can tell."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"
    LAYOUT = "layout"
    SAME = "same"


@dataclass(frozen=True)
class Deviation:
    """Of a part of a tensor: ``elements`` that differ, the ``largest`` absolute difference of floats (None if there is none), and
    the number of differences that are infinite or NaN (``undefined``)."""

    elements: int = 0
    largest: float | None = None
    undefined: int = 0

    def __add__(self, other: Deviation) -> Deviation:
        known = [one.largest for one in (self, other) if one.largest is not None]
        return Deviation(self.elements + other.elements, max(known, default=None), self.undefined + other.undefined)


@dataclass(frozen=True)
class Difference:
    """A tensor of either version.

    ``how``: its old and new dtype or shape if they differ. ``nbytes``: raw bytes in the later version, of a removed tensor in the
    earlier one. ``changed``: bytes that differ or, until they are read, of the chunks that may differ; None if manifests cannot
    tell. ``boxes``: the chunks that may have changed; None if the boxes differ. ``deviation``: the result of a comparison of the
    bytes.
    """

    name: str
    what: Change
    dtype: str
    nbytes: int
    chunks: int
    how: str = ""
    changed: int | None = 0
    boxes: tuple[Box, ...] | None = ()
    deviation: Deviation | None = None

    @property
    def comparable(self) -> bool:
        """Whether reading the bytes tells more: both versions have it, in one shape and dtype, and it may have changed."""
        return not self.how and self.what in (Change.LAYOUT, Change.CHANGED)

    @property
    def weight(self) -> int:
        """Bytes that may differ."""
        return self.nbytes if self.changed is None else self.changed


def differences(before: Version, after: Version) -> list[Difference]:
    """Compare all tensors of two versions by the digests in their manifests."""
    old, new = before.tensors(), after.tensors()
    found = []
    for name in sorted(old.keys() | new.keys()):
        if name not in new or name not in old:
            what, version = (Change.REMOVED, before) if name not in new else (Change.ADDED, after)
            info = version.tensors()[name]
            found.append(Difference(name, what, info.dtype, info.nbytes, len(version.chunks[name]), changed=info.nbytes))
        else:
            found.append(_difference(name, before, after))
    return found


def ordered(found: Sequence[Difference]) -> list[Difference]:
    """Return those that are not the same, the most bytes first."""
    return sorted((one for one in found if one.what is not Change.SAME), key=lambda one: (-one.weight, one.name))


def changed_values(before: Version, after: Version) -> dict[Change, list[str]]:
    """Return the names of plain values that were added, removed or changed."""
    old, new = value_texts(before), value_texts(after)
    if before.world_size != after.world_size:  # the ranks are not comparable, only the set of texts
        old, new = ({name: {text: set[int]() for text in texts} for name, texts in of.items()} for of in (old, new))
    return {
        Change.ADDED: sorted(new.keys() - old.keys()),
        Change.REMOVED: sorted(old.keys() - new.keys()),
        Change.CHANGED: sorted(name for name in old.keys() & new.keys() if old[name] != new[name]),
    }


def _difference(name: str, before: Version, after: Version) -> Difference:
    old, new, rows = before.tensors()[name], after.tensors()[name], after.chunks[name]
    pairs = ((old.dtype, new.dtype), (dimensions(old.shape), dimensions(new.shape)))
    if how := ", ".join(f"{a} -> {b}" for a, b in pairs if a != b):
        return Difference(name, Change.CHANGED, new.dtype, new.nbytes, len(rows), how, new.nbytes)
    known = {chunk.box: chunk for chunk in before.chunks[name]}
    if known.keys() != {chunk.box for chunk in rows}:
        return Difference(name, Change.LAYOUT, new.dtype, new.nbytes, len(rows), changed=None, boxes=None)
    differ = {chunk.box for chunk in rows if chunk.raw_digest != known[chunk.box].raw_digest}
    may = [chunk for chunk in rows if chunk.box in differ or _proof(before, known[chunk.box]) != _proof(after, chunk)]
    what = Change.CHANGED if differ else Change.LAYOUT if may else Change.SAME
    boxes, nbytes = tuple(chunk.box for chunk in may), sum(chunk.nbytes for chunk in may)
    return Difference(
        name, what, new.dtype, new.nbytes, len(rows), changed=None if what is Change.LAYOUT else nbytes, boxes=boxes
    )


def _proof(version: Version, chunk: Chunk) -> tuple[object, ...]:
    """What proves that the chunks of two versions are equal: the 64 bits of ``raw_digest`` do not, since those of chosen tensors
    can be equal."""
    return (version.bases.referenced(chunk)[1] if chunk.is_reference else chunk).proof


def compare(
    before: Version, after: Version, found: Sequence[Difference], progress: Callable[[int], None], *, slab: int = SLAB
) -> list[Difference]:
    """Read and compare the bytes of all that are ``comparable``.

    Args:
        before: The earlier version.
        after: The later version.
        found: The result of ``differences``.
        progress: Called with bytes that were compared; their sum is ``work(after, found)``.
        slab: Bytes of each version that are compared at a time.

    Returns:
        ``found``, with ``deviation`` and final ``what`` and ``changed`` of the compared tensors.

    Raises:
        Damaged: bytes do not match their digest.
    """
    sums: dict[str, Deviation] = {}
    readers = before.reader(), after.reader()
    for boxes in batches(_boxes(after, found, slab), lambda box: box.nbytes, slab):
        nbytes = sum(box.nbytes for box in boxes)
        old, new = np.empty(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        read_slab(before, readers[0], boxes, old)
        read_slab(after, readers[1], boxes, new)
        end = 0
        for box in boxes:
            bytes_of_box = slice(end, end + box.nbytes)
            deviation = deviate(old[bytes_of_box], new[bytes_of_box], dtypes.dtype(box.dtype))
            sums[box.name] = sums.get(box.name, Deviation()) + deviation
            end += box.nbytes
        progress(end)
    return [_settled(one, sums.get(one.name, Deviation())) if one.comparable else one for one in found]


def work(after: Version, found: Sequence[Difference]) -> int:
    """Return the raw bytes of each version that ``compare`` compares."""
    return sum(box.nbytes for box in _boxes(after, found, SLAB))


def deviate(old: Bytes, new: Bytes, format: DType, *, block: int = _BLOCK) -> Deviation:
    """Compare two arrays of equal size element by element, by their bits: NaN equals the same NaN, and 0 differs from -0."""
    word, step = np.dtype(f"u{min(format.itemsize, 8)}"), block * format.itemsize
    total = Deviation()
    for start in range(0, old.size, step):
        a, b = old[start : start + step], new[start : start + step]
        pairs = (part.view(word).reshape(-1, format.itemsize // word.itemsize) for part in (a, b))
        differ = np.logical_or.reduce(np.not_equal(*pairs), axis=1)
        if count := int(np.count_nonzero(differ)):
            distance = _distance(_floats(a, format)[differ], _floats(b, format)[differ]) if format.is_float else (None, 0)
            total += Deviation(count, *distance)
    return total


def _floats(raw: Bytes, format: DType) -> npt.NDArray[np.generic]:
    """One row per element, with its one or (of a complex number) two floats."""
    names = {8: "float64", 4: "float32", 2: "float16", 1: format.name}
    kind = dtypes.to_numpy("bfloat16" if format.name == "bfloat16" else names[format.width])
    return raw.view(kind).reshape(-1, format.itemsize // format.width)


def _distance(a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> tuple[float | None, int]:
    with np.errstate(all="ignore"):
        apart = np.abs(b.astype(np.float64) - a.astype(np.float64)).max(axis=1)
    finite = np.isfinite(apart)
    return (float(apart[finite].max()) if finite.any() else None), int(apart.size - np.count_nonzero(finite))


def _boxes(after: Version, found: Sequence[Difference], slab: int) -> Iterator[TensorBox]:
    """The chunks of each tensor that may have changed; where their boxes differ, boxes of whole rows."""
    for one in found:
        if not one.comparable:
            continue
        if one.boxes is not None:
            yield from (TensorBox(one.name, one.dtype, box, is_chunk=True) for box in one.boxes)
        else:
            yield from (box for box in boxes_of(one.name, after.tensors()[one.name], slab) if box.nbytes)


def _settled(one: Difference, deviation: Deviation) -> Difference:
    what = Change.CHANGED if deviation.elements else Change.SAME
    return replace(one, what=what, changed=deviation.elements * dtypes.dtype(one.dtype).itemsize, deviation=deviation)
