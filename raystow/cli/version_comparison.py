"""Compares two versions: by the digests in their manifests, which reads no pack, and by their bytes, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

from ..orchestrator.export.slabs import TensorBox, boxes_of, read_slab, slabs
from ..orchestrator.export.version_files import value_texts
from ..storage.coding import dtypes
from ..storage.coding.dtypes import DType
from ..storage.coding.kernels import Bytes
from ..storage.format.manifest import Chunk
from ..storage.format.rank_spans import RankSet
from ..storage.versions.contents import TensorSum
from ..storage.versions.matched_rows import matched_rows
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
    tell. ``suspect``: the number of chunks that may have changed; None if the boxes differ. ``work``: raw bytes to read to
    compare them. ``deviation``: the result of a comparison of the bytes.
    """

    name: str
    what: Change
    dtype: str
    nbytes: int
    chunks: int
    how: str = ""
    changed: int | None = 0
    suspect: int | None = 0
    work: int = 0
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
    old, new = before.contents.tensors, after.contents.tensors
    same = {name: _Pairs() for name in old.keys() & new.keys() if _layout(old[name]) == _layout(new[name])}
    for a, b in matched_rows(before, after, same):
        same[b.name].add(a, b, proven=_proof(before, a) == _proof(after, b))
    found = []
    for name in sorted(old.keys() | new.keys()):
        if name not in new or name not in old:
            what, one = (Change.REMOVED, old[name]) if name not in new else (Change.ADDED, new[name])
            found.append(Difference(name, what, one.dtype, one.raw, one.chunks, changed=one.raw))
        else:
            found.append(_difference(name, old[name], new[name], same.get(name)))
    return found


def ordered(found: Sequence[Difference]) -> list[Difference]:
    """Return those that are not the same, the most bytes first."""
    return sorted((one for one in found if one.what is not Change.SAME), key=lambda one: (-one.weight, one.name))


def changed_values(before: Version, after: Version) -> dict[Change, list[str]]:
    """Return the names of plain values that were added, removed or changed."""
    old, new = value_texts(before), value_texts(after)
    if before.world_size != after.world_size:  # the ranks are not comparable, only the set of texts
        old, new = ({name: {text: RankSet() for text in texts} for name, texts in of.items()} for of in (old, new))
    return {
        Change.ADDED: sorted(new.keys() - old.keys()),
        Change.REMOVED: sorted(old.keys() - new.keys()),
        Change.CHANGED: sorted(name for name in old.keys() & new.keys() if old[name] != new[name]),
    }


def _layout(one: TensorSum) -> tuple[object, ...]:
    """Equal if two tensors can have the same boxes."""
    return one.shape, one.dtype, one.chunks


@dataclass
class _Pairs:
    """Counts the chunks of a tensor that have the same box in both versions, those whose digests differ, and those that may have
    changed, with their bytes."""

    number: int = 0
    different: int = 0
    suspect: int = 0
    nbytes: int = 0

    def add(self, before: Chunk, after: Chunk, *, proven: bool) -> None:
        differs = before.raw_digest != after.raw_digest
        self.number += 1
        self.different += differs
        if differs or not proven:
            self.suspect += 1
            self.nbytes += after.nbytes


def _difference(name: str, old: TensorSum, new: TensorSum, pairs: _Pairs | None) -> Difference:
    looks = ((old.dtype, new.dtype), (dimensions(old.shape), dimensions(new.shape)))
    if how := ", ".join(f"{a} -> {b}" for a, b in looks if a != b):
        return Difference(name, Change.CHANGED, new.dtype, new.raw, new.chunks, how, new.raw)
    if pairs is None or pairs.number != new.chunks:
        return Difference(name, Change.LAYOUT, new.dtype, new.raw, new.chunks, changed=None, suspect=None, work=new.raw)
    what = Change.CHANGED if pairs.different else Change.LAYOUT if pairs.suspect else Change.SAME
    changed = None if what is Change.LAYOUT else pairs.nbytes
    return Difference(name, what, new.dtype, new.raw, new.chunks, changed=changed, suspect=pairs.suspect, work=pairs.nbytes)


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
        progress: Called with bytes that were compared; their sum is ``work(found)``.
        slab: Bytes of each version that are compared at a time.

    Returns:
        ``found``, with ``deviation`` and final ``what`` and ``changed`` of the compared tensors.

    Raises:
        Damaged: bytes do not match their digest.
    """
    sums: dict[str, Deviation] = {}
    readers = before.reader(), after.reader()
    for boxes in slabs(_boxes(before, after, found, slab), slab):
        nbytes = sum(box.nbytes for box in boxes)
        old, new = np.empty(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        read_slab(readers[0], boxes, old, place=0)
        read_slab(readers[1], boxes, new, place=1)
        end = 0
        for box in boxes:
            bytes_of_box = slice(end, end + box.nbytes)
            deviation = deviate(old[bytes_of_box], new[bytes_of_box], dtypes.dtype(box.dtype))
            sums[box.name] = sums.get(box.name, Deviation()) + deviation
            end += box.nbytes
        progress(end)
    return [_settled(one, sums.get(one.name, Deviation())) if one.comparable else one for one in found]


def work(found: Sequence[Difference]) -> int:
    """Return the raw bytes of each version that ``compare`` compares."""
    return sum(one.work for one in found if one.comparable)


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


def _boxes(before: Version, after: Version, found: Sequence[Difference], slab: int) -> Iterator[TensorBox]:
    """The chunks of each tensor that may have changed; where their boxes differ, boxes of whole rows."""
    suspects = {one.name for one in found if one.comparable and one.suspect}
    for a, b in matched_rows(before, after, suspects) if suspects else ():
        if a.raw_digest != b.raw_digest or _proof(before, a) != _proof(after, b):
            yield TensorBox(b.name, b.dtype, b.box, ([a], [b]))
    yield from boxes_of([before, after], [one.name for one in found if one.comparable and one.suspect is None], slab)


def _settled(one: Difference, deviation: Deviation) -> Difference:
    what = Change.CHANGED if deviation.elements else Change.SAME
    return replace(one, what=what, changed=deviation.elements * dtypes.dtype(one.dtype).itemsize, deviation=deviation)
