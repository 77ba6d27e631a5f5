"""What a version contains, summed up while its manifest is read once: memory for each name, and for none of the rows."""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..coding import dtypes
from ..coding.rounded import Rounded
from ..errors import Damaged
from ..format.boxes import PRIME, Measure, joined
from ..format.manifest import Chunk, Fragment

DERIVED = "derived"
"""In place of a codec: chunks without bytes of their own."""

_NAME = operator.attrgetter("name")


@dataclass
class TensorSum:
    """A tensor. ``split``: the first dimension along which it was saved in several boxes. ``chunks``, ``held``, ``stored``: its
    rows, their elements and stored bytes. ``measure``: what their boxes count."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    group: str
    offset: tuple[int, ...]
    split: int | None = None
    chunks: int = 0
    held: int = 0
    stored: int = 0
    measure: int = 0

    @property
    def raw(self) -> int:
        """Bytes of all elements that its rows hold."""
        return self.held * dtypes.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Share:
    """A part of a version: its number of tensors or planes, their raw and stored bytes."""

    count: int = 0
    raw: int = 0
    stored: int = 0


def shares(parts: Iterable[tuple[str, int, int]]) -> dict[str, Share]:
    """Sum up parts, each with a key, its raw and its stored bytes; the key with the most stored bytes first."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for key, raw, stored in parts:
        found = sums[key]
        found[0] += 1
        found[1] += raw
        found[2] += stored
    return {key: Share(*of) for key, of in sorted(sums.items(), key=lambda item: (-item[1][2], item[0]))}


class TensorSums:
    """The tensors of a manifest whose fragments are added one by one. ``subject``: the version, for errors. ``measure``: counts
    boxes, for ``check``."""

    def __init__(self, subject: str, measure: Measure | None = None) -> None:
        self.sums: dict[str, TensorSum] = {}
        self._subject, self._measure = subject, measure

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Add rows of any tensors. Raises ``Damaged`` if rows of one disagree."""
        for name, same in itertools.groupby(chunks, _NAME):
            rows = list(same)
            first = rows[0]
            found = self.sums.get(name)
            if found is None:
                found = self.sums[name] = TensorSum(first.path, first.shape, first.dtype, first.kind, first.group, first.offset)
            for row in rows:
                if row.shape != found.shape or row.dtype != found.dtype or row.kind != found.kind:
                    raise Damaged(f"rows of {name!r} disagree on shape, dtype or kind", subject=self._subject)
                if found.split != 0 and row.offset != found.offset:
                    found.split = min(_split(row.offset, found.offset), len(row.shape) if found.split is None else found.split)
                found.held += math.prod(row.extent)
                found.stored += row.stored
            found.chunks += len(rows)
            if self._measure is not None:
                counts = map(self._measure.count, joined(row.box for row in rows))
                found.measure = (found.measure + sum(counts)) % PRIME

    def check(self) -> None:
        """Raise ``Damaged`` unless the rows cover each tensor, so that no absurd shape is allocated; with a measure, unless they
        hold each element exactly once."""
        for name, found in self.sums.items():
            if found.held != (size := math.prod(found.shape)):
                what = f"the manifest covers {found.held} of {size} elements of {name!r}"
                raise Damaged(what, subject=self._subject)
            if self._measure is not None and found.measure != self._measure.count(((0,) * len(found.shape), found.shape)):
                raise Damaged("the manifest's chunks do not hold each element exactly once", subject=name)


@dataclass(frozen=True)
class Contents:
    """The sums of a version. ``values``: the number of plain values of rank 0."""

    tensors: Mapping[str, TensorSum]
    rounded: Mapping[str, Rounded]
    planes: Mapping[str, Share]
    values: int

    @property
    def chunks(self) -> int:
        """The number of rows that are chunks."""
        return sum(one.chunks for one in self.tensors.values())


def contents(fragments: Iterable[Fragment], subject: str) -> Contents:
    """Sum up fragments. Raises ``Damaged`` as ``TensorSums``."""
    tensors, rounded, values = TensorSums(subject), dict[str, Rounded](), set[str]()

    def planes() -> Iterator[tuple[str, int, int]]:
        for fragment in fragments:
            tensors.add(fragment.chunks)
            for name, one in fragment.rounded.items():
                rounded[name] = rounded[name] | one if name in rounded else one
            values.update(value.name for value in fragment.values if 0 in value.ranks)
            yield from _planes(fragment.chunks, subject)

    by_codec = shares(planes())
    tensors.check()
    return Contents(dict(sorted(tensors.sums.items())), dict(sorted(rounded.items())), by_codec, len(values))


def _split(offset: Sequence[int], other: Sequence[int]) -> int:
    return next(axis for axis, pair in enumerate(zip(offset, other, strict=True)) if pair[0] != pair[1])


def _planes(chunks: Iterable[Chunk], subject: str) -> Iterator[tuple[str, int, int]]:
    """Yield the codec, raw and stored bytes of each plane; a chunk that is derived or was not split is one plane."""
    for chunk in chunks:
        if chunk.derivation is not None:
            yield DERIVED, chunk.nbytes, 0
            continue
        codecs, sizes = chunk.coding.codecs, chunk.coding.stored
        if len(codecs) != len(sizes):  # both are empty for chunks that an earlier version has
            raise Damaged(f"a chunk of {chunk.name!r} has {len(codecs)} codecs for {len(sizes)} planes", subject=subject)
        for codec, stored in zip(codecs, sizes, strict=True):
            yield codec, chunk.nbytes // len(codecs), stored
