"""The manifest of a version in its store: fragments, each checked against its digest in the record when it is read."""

from __future__ import annotations

import functools
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from ..errors import Damaged
from ..format import keys
from ..format.boxes import Box
from ..format.manifest import Chunk, Fragment
from ..format.pack_sizes import PackSizes, listed, pack_sizes
from ..format.selection import Selection, Sought, select
from ..format.version_record import FragmentInfo, PackInfo, VersionRecord
from ..limits import MAX_FRAGMENT
from ..runtime.bounded_map import bounded_map
from ..runtime.gc_pause import uncollected
from ..runtime.memory_budget import MemoryBudget
from .tensor_index import Finder, Seeker, by_first_rank

KEPT = 1 << 17
"""Rows of a manifest that stay in memory: about 200 MiB. Of a larger one, fragments are read one after the other."""

_AHEAD, _AHEAD_BYTES = 4, 64 << 20  # fragments, and their bytes, that a walk reads ahead


class StoredManifest:
    """The manifest that a ``record`` names. ``read``: the bytes of an object, given its key, size, digest and limit, or
    ``Damaged``."""

    def __init__(self, record: VersionRecord, read: Callable[[str, int, str, int], bytes]) -> None:
        self.record, self._read = record, read
        self._boxes: dict[int, dict[tuple[str, Box], Chunk]] = {}  # by fragment
        self._evicting = threading.Lock()
        self._packs: dict[int, PackSizes] = {}  # by node, of the fragments that were read and kept

    @functools.cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        """The manifest, each fragment checked against its digest in the record. All of it is in memory: see ``walk``."""
        return tuple(self._kept(info) for info in self.record.fragments)

    def walk(self, *, by_rank: bool = False) -> Iterator[tuple[FragmentInfo, Fragment]]:
        """The fragments one after the other, in the order of their keys, or of their ranks. A manifest of more than ``KEPT`` rows
        is not kept, and read again by each walk."""
        infos = self._by_rank if by_rank else sorted(self.record.fragments, key=self.key)
        if self.is_small:
            found = {info.node: fragment for info, fragment in zip(self.record.fragments, self.fragments, strict=True)}
            yield from ((info, found[info.node]) for info in infos)
            return
        for info, data in self._read_ahead(infos):
            with _parsed.taking(info.memory):
                fragment = self._parse(info, data)
            yield info, fragment

    def select(self, sought: Mapping[str, Sought]) -> Iterator[Fragment]:
        """All plain values and at least the sought rows, in one fragment after the other, in the order of their ranks. No other
        rows of a large manifest become objects."""
        if self.is_small:
            yield from (fragment for _, fragment in self.walk(by_rank=True))
            return
        for info, data in self._read_ahead(self._by_rank):
            with _parsed.taking(info.memory):
                found = self._select(info, data, sought)
            yield Fragment(info.node, tuple(found.chunks), tuple(found.values))

    def _read_ahead(self, infos: Iterable[FragmentInfo]) -> Iterator[tuple[FragmentInfo, bytes]]:
        with ThreadPoolExecutor(_AHEAD, "raystow-walk") as pool:
            read = bounded_map(pool, lambda info: (info, self.data(info)), infos, cost=lambda info: info.size, limit=_AHEAD_BYTES)
            yield from read

    @functools.cached_property
    def is_small(self) -> bool:
        """Whether it is kept in memory."""
        return sum(info.chunks for info in self.record.fragments) <= KEPT

    def key(self, info: FragmentInfo) -> str:
        """The key of a fragment of the record."""
        return keys.fragment(self.record.id, self.record.attempt, info.node)

    def pack_size(self, node: int, group: str, number: int) -> int | None:
        """The bytes of a pack; None if there is no such pack, or if its fragment was not read."""
        found = self._packs if self.record.packs is None else self.listed_packs
        return found.get(node, {}).get((group, number))

    @functools.cached_property
    def listed_packs(self) -> Mapping[int, PackSizes]:
        """The packs that the record lists, by node. None in new records, whose fragments name them."""
        return listed(self.record.packs or ())

    @property
    def packs(self) -> Iterator[PackInfo]:
        """Its packs. Reads one fragment after the other."""
        if self.record.packs is not None:
            yield from self.record.packs
            return
        for info in self.record.fragments:
            for (group, number), end in sorted(self._sizes(info).items()):
                yield PackInfo(info.node, group, number, end)

    def chunk(self, name: str, box: Box, *, near: int) -> Chunk | None:
        """The chunk of a tensor that has just this box; ``near``: the rank in whose fragment it should stand, or near it."""
        found = (self._rows(node).get((name, box)) for node in self._nodes_near(near))
        return next(filter(None, found), None)

    def first_rank(self, node: int) -> int:
        """The lowest rank of a node's fragment."""
        return min(self._infos[node].ranks, default=0)

    def _nodes_near(self, rank: int) -> Iterator[int]:
        """The nodes, first those with the nearest ranks."""
        at = max(0, bisect_right(self._by_rank, rank, key=lambda info: min(info.ranks, default=0)) - 1)
        if self._by_rank:
            yield self._by_rank[at].node
        others = sorted(range(len(self._by_rank)), key=lambda place: abs(place - at))
        yield from (self._by_rank[place].node for place in others[1:])

    @functools.cached_property
    def _by_rank(self) -> list[FragmentInfo]:
        return by_first_rank(self.record.fragments)

    @functools.cached_property
    def _infos(self) -> dict[int, FragmentInfo]:
        return {info.node: info for info in self.record.fragments}

    def _rows(self, node: int) -> dict[tuple[str, Box], Chunk]:
        """The chunks of a node's fragment by name and box. Keeps ``KEPT`` of all nodes, or those of one."""
        found = self._boxes.get(node)
        if found is None:
            info = self._infos[node]
            found = {(chunk.name, chunk.box): chunk for chunk in self._kept(info).chunks}
            with self._evicting:
                while self._boxes and len(found) + sum(map(len, self._boxes.values())) > KEPT:
                    del self._boxes[next(iter(self._boxes))]
                self._boxes[node] = found
        return found

    def finder(self, seeker: Seeker) -> Finder:
        """Return what finds the manifest rows that a rank needs, and reads no more of the manifest than necessary."""

        def rows(info: FragmentInfo, sought: Mapping[str, Sought]) -> Selection:
            with _parsed.taking(info.memory):
                selection = self._select(info, self.data(info), sought)
            self._note_packs(info, selection.packs)
            return selection

        return Finder(self.record.fragments, rows, seeker, self.record.raw, self.record.parts)

    def _kept(self, info: FragmentInfo) -> Fragment:
        """A fragment that stays in memory, so its packs are noted."""
        with _parsed.taking(info.memory):
            fragment = self._parse(info, self.data(info))
        self._note_packs(info, fragment.packs)
        return fragment

    def _select(self, info: FragmentInfo, data: bytes, sought: Mapping[str, Sought]) -> Selection:
        selection = select(data, info.node, self.key(info), sought)
        self._check_packs(info, selection.packs)
        return selection

    def _parse(self, info: FragmentInfo, data: bytes) -> Fragment:
        key = self.key(info)
        with uncollected():
            fragment = Fragment.load(data, info.node, key)
        if len(fragment.chunks) != info.chunks:
            what = f"has {len(fragment.chunks)} chunks, and the record says {info.chunks}"
            raise Damaged(what, subject=key)
        self._check_packs(info, fragment.packs)
        return fragment

    def _sizes(self, info: FragmentInfo) -> PackSizes:
        if (found := self._packs.get(info.node)) is None:
            with _parsed.taking(info.memory):
                found = pack_sizes(self.data(info), self.key(info))
            self._check_packs(info, found)
            if self.is_small:
                self._note_packs(info, found)
        return found

    def _check_packs(self, info: FragmentInfo, found: PackSizes) -> None:
        """Raise ``Damaged`` unless a fragment names as many packs as the record says, if that does not list them."""
        if self.record.packs is None and len(found) != info.packs:
            raise Damaged(f"has {len(found)} packs, and the record says {info.packs}", subject=self.key(info))

    def _note_packs(self, info: FragmentInfo, found: PackSizes) -> None:
        if self.record.packs is None:
            self._packs[info.node] = found

    def data(self, info: FragmentInfo) -> bytes:
        """The bytes of a fragment, checked against their digest."""
        return self._read(self.key(info), info.size, info.digest, MAX_FRAGMENT)


_parsed = MemoryBudget(2 << 30)  # bytes of fragments that all threads of this process parse at a time
