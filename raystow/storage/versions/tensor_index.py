"""Finds the manifest rows that one rank needs without reading all of a large manifest.

A version that 2,048 nodes saved has 2,048 fragments, and the rows for one rank are mostly in one or two of them. The likely ones
are read first. When every box is covered, the others are not read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType

from ..coding import dtypes
from ..errors import Damaged
from ..format.boxes import overlap, span, tile
from ..format.manifest import Chunk, Value, parse_path
from ..format.parts import is_part, part_number, part_of
from ..format.selection import Selection, Sought, sought_like
from ..format.version_record import FragmentInfo
from .value_tree import RankValues, containers

_AT_ONCE = 8  # fragments read in parallel
NO_PARTS: Mapping[str, int] = MappingProxyType({})
_SAMPLE = 16  # fragments, evenly spread, read to locate a tensor


def by_first_rank(fragments: Iterable[FragmentInfo]) -> list[FragmentInfo]:
    """The fragments in the order of their ranks, as the parts of a tensor mostly are. Nodes have other numbers in each save."""
    return sorted(fragments, key=lambda info: (min(info.ranks, default=0), info.node))


@dataclass(frozen=True)
class Seeker:
    """The rank that reads: ``rank`` of ``world_size``, in a version that ``saved`` ranks saved. ``part``: or a part, which is
    rank 0 of one rank, and was when it was saved."""

    rank: int
    world_size: int
    saved: int
    part: str = ""

    def reads(self, info: FragmentInfo) -> bool:
        """Whether a fragment may have anything of it."""
        if self.part:
            return part_number(self.part) in info.ranks
        return not info.ranks or not all(map(is_part, info.ranks))

    def owns(self, name: str) -> bool:
        """Whether a tensor or value of this name is its own, or that of all ranks if it is one."""
        return part_of(name) == self.part

    def near(self, rank: int) -> range:
        """The ranks of the save with the parts of tensors that ``rank`` has now, if both worlds split tensors evenly."""
        first, end = rank * self.saved // self.world_size, -(-(rank + 1) * self.saved // self.world_size)
        return range(first, max(first + 1, end))


@dataclass
class FoundRows:
    """Chunk rows that overlap the sought boxes, and value rows, by name: the rank's own value, else that of the lowest rank that
    was read. ``names``: of all tensors that were read. ``ranks``: what is known of the values of all ranks. ``every``: the values
    of all ranks where they are sought."""

    ranks: RankValues
    chunks: dict[str, list[Chunk]] = field(default_factory=lambda: defaultdict(list))
    values: dict[str, Value] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    every: list[Value] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that were found, whole."""
        first = [rows[0] for rows in self.chunks.values() if rows]
        return sum(math.prod(row.shape) * dtypes.dtype(row.dtype).itemsize for row in first)


class Finder:
    """Reads fragments for one rank. ``read``: returns the rows of a fragment that are sought, by name. ``parts``: bytes of the
    tensors of each part; ``raw``: of all tensors of the version."""

    def __init__(
        self,
        fragments: Sequence[FragmentInfo],
        read: Callable[[FragmentInfo, Mapping[str, Sought]], Selection],
        seeker: Seeker,
        raw: int = -1,
        parts: Mapping[str, int] = NO_PARTS,
    ) -> None:
        if parts:
            fragments = [info for info in fragments if seeker.reads(info)]
            raw = parts.get(seeker.part, 0) if seeker.part else raw - sum(parts.values())
        self._fragments = by_first_rank(fragments)
        self._read_one, self._seeker, self._raw = read, seeker, raw
        self._owns: Callable[[str], bool] = seeker.owns if parts or seeker.part else lambda name: True
        self._unread = set(range(len(fragments)))
        self._open: dict[str, Sought] = {}
        self._every: set[str] = set()
        self._spans: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)  # name -> place of a fragment -> what it holds
        self._lowest: dict[str, int] = {}  # name of a value or container -> -1 if it is the rank's own, else the lowest rank
        self.found = FoundRows(RankValues(seeker.world_size))

    def find(self, sought: Mapping[str, Sought]) -> FoundRows:
        """Read until everything that is sought is covered, or everything is read. What is not found is not in the version, or not
        completely. ``Damaged`` if rows contradict each other."""
        self._open = dict(sought)
        self._every = {name for name, wanted in sought.items() if wanted.every}
        for wave in filter(None, self._waves()):
            self._read(wave)
            self._open = {name: wanted for name, wanted in self._open.items() if not self._settled(name, wanted)}
            if not self._open or self._only_values_are_open():
                break
        return self.found

    @property
    def complete(self) -> bool:
        """Whether all names of tensors are known: each element is stored once, so a version whose bytes are all found holds no
        other tensor, except empty ones."""
        return not self._unread or self.found.nbytes == self._raw

    def read_all(self) -> FoundRows:
        """Read what ``find`` has not read, for the names of all tensors and the values of all ranks."""
        self._open = {}
        self._read(set(self._unread))
        return self.found

    def _only_values_are_open(self) -> bool:
        """Whether nothing is open but plain values of containers that this rank has saved otherwise, and that hold no tensors."""
        containers = {wanted.container for wanted in self._open.values() if not wanted.tensor and not wanted.beneath}
        return (
            not any(wanted.tensor or wanted.beneath for wanted in self._open.values())
            and all(self._is_known(name) for name in containers)
            and self.complete
        )

    def _waves(self) -> Iterator[set[int]]:
        """Fragments to read next: the likely ones for what is still missing, then all."""
        seeker, count = self._seeker, len(self._fragments)
        yield self._of({seeker.rank})
        firsts = {rank for wanted in self._open.values() for rank in (seeker.rank, *wanted.holders[:1])}
        yield self._of({0, *(near for rank in firsts for near in seeker.near(rank))})
        holders = {rank for wanted in self._open.values() for rank in wanted.holders}
        adjacent = {near.start - 1 for near in map(seeker.near, firsts)} | {near.stop for near in map(seeker.near, firsts)}
        yield self._of({*adjacent, *(near for rank in holders for near in seeker.near(rank))})
        yield set(range(0, count, max(1, count // _SAMPLE))) & self._unread
        while guessed := self._guessed():
            yield guessed
        yield set(self._unread)

    def _of(self, ranks: set[int]) -> set[int]:
        return {place for place in self._unread if not ranks.isdisjoint(self._fragments[place].ranks)}

    def _read(self, wave: set[int]) -> None:
        self._unread -= wave
        places, found = sorted(wave), self.found
        for place, part in zip(places, self._parts(places), strict=True):
            found.names.update(filter(self._owns, part.names))
            for chunk in part.chunks:
                same = found.chunks[chunk.name]
                if same and (same[0].shape, same[0].dtype, same[0].kind) != (chunk.shape, chunk.dtype, chunk.kind):
                    raise Damaged(f"rows of {chunk.name!r} disagree on shape, dtype or kind", subject=chunk.name)
                same.append(chunk)
            for value in part.values:
                if self._owns(value.name):
                    self._take(value)
            if self._unread:
                for name, held in part.spans.items():
                    self._spans[name][place] = held

    def _parts(self, places: Sequence[int]) -> Iterator[Selection]:
        """The sought rows of the fragments at ``places``, in order; several are read in parallel."""

        def read(place: int) -> Selection:
            return self._read_one(self._fragments[place], self._open)

        if len(places) < 2:
            yield from map(read, places)
            return
        with ThreadPoolExecutor(_AT_ONCE, "raystow-find") as pool:
            yield from pool.map(read, places)

    def _take(self, value: Value) -> None:
        """Keep the rank's own value if it has saved one, else that of the lowest rank."""
        found = self.found
        found.ranks.take(value)
        holder, known = self._holder(value), found.values.get(value.name)
        if known is None or holder < self._holder(known):
            found.values[value.name] = value
        around = list(containers(parse_path(value.path)))
        for name in around:
            self._lowest[name] = min(holder, self._lowest.get(name, holder))
        if not self._every.isdisjoint(around):
            found.every.append(value)

    def _holder(self, value: Value) -> int:
        return -1 if self._seeker.rank in value.ranks else min(value.ranks)

    def _is_known(self, name: str) -> bool:
        """Whether no fragment that is not read has a value or container of this name that comes before the known one."""
        unread = min((min(self._fragments[place].ranks, default=0) for place in self._unread), default=math.inf)
        return name in self._lowest and self._lowest[name] <= unread

    def _settled(self, name: str, wanted: Sought) -> bool:
        rows = self.found.chunks.get(name)
        if wanted.beneath:
            own = wanted.own and not self._of({self._seeker.rank})  # a node's fragment has all that its ranks have saved alone
            return own or self._has_all_beneath(name, wanted)
        if name in self.found.values and not wanted.tensor:
            return self._is_known(name)
        if not rows:
            return False
        if wanted.box is not None and rows[0].shape != wanted.shape:
            return True  # the caller reports it
        return _has(wanted, rows)

    def _has_all_beneath(self, name: str, wanted: Sought) -> bool:
        """Whether all is found that is like something known. Empty tensors are not counted by ``complete``."""
        if (
            not wanted.like
            or any(0 in one.shape for one in wanted.like.values())
            or not self._is_known(name)
            or not self.complete
        ):
            return False
        within = f"{name}."
        return all(
            _has(sought_like(tensor, rows[0].shape, wanted.like), rows)
            for tensor, rows in self.found.chunks.items()
            if rows and tensor.startswith(within)
        )

    def _guessed(self) -> set[int]:
        """The fragments from the one that should contain the beginning of an open box to the one with its end, interpolated from
        those that were read: a tensor's parts mostly ascend with the ranks, though not always evenly."""
        guessed = set[int]()
        for name, wanted in self._open.items():
            spans = sorted((place, *held) for place, held in self._spans[name].items())
            if wanted.box is not None and spans:
                ends = [_near(spans, at, len(self._fragments), math.prod(wanted.shape)) for at in span(wanted.box, wanted.shape)]
                guessed.update(range(ends[0], ends[1] + 1))
        return guessed & self._unread


def _has(wanted: Sought, rows: Sequence[Chunk]) -> bool:
    """Whether rows of one tensor cover what is sought of it."""
    if wanted.box is None:
        return sum(math.prod(row.extent) for row in rows) >= math.prod(rows[0].shape)
    return tile([part for row in rows if (part := overlap(wanted.box, row.box)) is not None], wanted.box)


def _near(spans: Sequence[tuple[int, int, int]], at: int, count: int, size: int) -> int:
    """The fragment among ``count`` where element ``at`` of ``size`` should be. ``spans``: (fragment, first, last element),
    ascending."""
    before = max((held for held in spans if held[1] <= at), default=(-1, -1, -1))
    if before[2] >= at:
        return before[0]
    after = min((held for held in spans if held[1] > at and held[0] > before[0]), default=(count, size, size))
    step = (at - before[2]) * (after[0] - before[0]) // max(1, after[1] - before[2])
    return min(max(before[0] + 1, before[0] + step), after[0] - 1, count - 1)
