"""Writes some tensors of a version again, as packs and fragments of another attempt. Plan, then execute.

Stored bytes are copied with their digests, which are checked on the way, unless they must be coded anew: if a chunk is derived
from a tensor that is not kept (weights are their rounded master copy), if it gets another base, or if it is rounded. Boxes stay,
and so does every bit that is not rounded. What is derived from rounded numbers gets bytes of its own.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from ..coding import delta, dtypes
from ..coding.chunk import ChunkEncoder
from ..coding.derived import Derivation
from ..coding.digest import raw_digest, stored_digest
from ..coding.kernels import Bytes
from ..coding.nearest import round_to_nearest
from ..coding.rounded import Rounded, together
from ..format import keys
from ..format.groups import WEIGHTS, group
from ..format.manifest import Chunk, Fragment
from ..format.version_record import FragmentInfo
from ..object_store import Buffer
from ..runtime.batches import batches
from ..runtime.bounded_map import bounded_map
from ..versions.reader import Request
from ..versions.runs import decode
from ..versions.version import Version

PACK_BYTES = 64 << 20  # bytes
_AT_ONCE = 4  # packs

_MEMORY, _ROW = 512 << 20, 2048  # bytes of packs and rows at a time, and of a row

_SAMPLE = 4  # chunks of each group and dtype that an estimate reads

_LEAST = 4096  # bytes of a tensor that is rounded

Progress = Callable[[int], None]
Ask = Callable[[Chunk], bool]


@dataclass(frozen=True)
class Bundle:
    """Rows that share stored bytes. ``rows``: the new rows but for their place; the bytes are those of the first one's tensor.
    ``source``: the present row, if it is decoded and coded anew. ``bits``: the mantissa bits to which it is rounded."""

    rows: tuple[Chunk, ...]
    source: Chunk | None = None
    bits: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the pack at most."""
        return self.rows[0].coding.size if self.source is None else self.source.nbytes

    @property
    def read(self) -> int:
        """Stored bytes to read; estimated for a reference."""
        return self.rows[0].nbytes // 2 if self.source is not None and self.source.is_reference else self.rows[0].coding.size

    def likely(self, *, as_delta: bool) -> int:
        """Estimated bytes in the pack. A rounded number takes a sign, three bits of exponent and its mantissa; a delta takes
        half."""
        if self.source is None:
            return self.nbytes
        rounded = self.nbytes if self.bits is None else self.nbytes * (self.bits + 4) // (8 * self.rows[0].words.itemsize)
        return rounded // 2 if as_delta else rounded


@dataclass(frozen=True)
class PlannedPack:
    """The content of one pack, in order."""

    node: int
    group: str
    number: int
    bundles: tuple[Bundle, ...]

    @property
    def cost(self) -> int:
        """Bytes of memory."""
        return 2 * sum(bundle.nbytes for bundle in self.bundles)


@dataclass(frozen=True)
class _Kept:
    """The rows of a node that are kept, and what the record says of its fragment now."""

    info: FragmentInfo
    fragment: Fragment

    @property
    def cost(self) -> int:
        return _ROW * len(self.fragment.chunks)


@dataclass(frozen=True)
class Estimate:
    """The work of a rewriting. ``read``, ``stored``: bytes to read, and of the new attempt. ``copied``: stored bytes that are
    copied as they are. ``recoded``: of chunks that are coded anew, by group, dtype and whether they are references, their bytes
    and some of them."""

    read: int
    stored: int
    copied: int
    recoded: Mapping[tuple[object, ...], tuple[int, Sequence[Bundle]]]


class _Sample:
    """Some of the bundles that it is given, evenly spread: at most twice ``_SAMPLE`` are in memory."""

    def __init__(self) -> None:
        self.nbytes = self._count = 0
        self._every, self._some = 1, list[Bundle]()

    def add(self, bundle: Bundle) -> None:
        if self._count % self._every == 0:
            self._some.append(bundle)
        if len(self._some) > 2 * _SAMPLE:
            self._some, self._every = self._some[::2], 2 * self._every
        self._count += 1
        self.nbytes += bundle.nbytes

    @property
    def bundles(self) -> Sequence[Bundle]:
        return self._some[:: -(-len(self._some) // _SAMPLE)]


@dataclass(frozen=True)
class Rewriting:
    """The plan. ``base``: the version that chunks become or stay deltas to. ``weights_only``, ``recode``, ``bits``: see ``plan``.

    It takes memory for some fragments: each use walks through the manifest.
    """

    version: Version
    base: Version | None
    weights_only: bool = False
    recode: bool = True
    bits: int | None = None

    @property
    def read(self) -> int:
        """Stored bytes to read."""
        return self.estimate.read

    @property
    def stored(self) -> int:
        """Stored bytes of the new attempt, estimated."""
        return self.estimate.stored

    @functools.cached_property
    def estimate(self) -> Estimate:
        """What it takes."""
        read = stored = copied = 0
        alike = defaultdict[tuple[object, ...], _Sample](_Sample)
        for _, packs in self._fragments():
            for bundle in itertools.chain.from_iterable(pack.bundles for pack in packs):
                read, stored = read + bundle.read, stored + bundle.likely(as_delta=self.base is not None)
                if (source := bundle.source) is None:
                    copied += bundle.nbytes
                else:
                    alike[source.group, source.dtype, source.is_reference].add(bundle)
        return Estimate(read, stored, copied, {kind: (some.nbytes, some.bundles) for kind, some in alike.items()})

    def sampled(self) -> int:
        """Stored bytes of the new attempt, estimated by coding some chunks of each group and dtype, which are read for it.
        ``Damaged`` as for ``execute``."""
        size = self.estimate.copied
        for nbytes, some in self.estimate.recoded.values():
            encoder = ChunkEncoder(max(bundle.nbytes for bundle in some))
            coded = sum(owner.coding.size for owner in (self._recoded(encoder, *_recoding(bundle))[1] for bundle in some))
            read = sum(bundle.nbytes for bundle in some)
            size += round(coded * nbytes / read) if read else 0
        return size

    def execute(self, attempt: str, progress: Progress = lambda nbytes: None) -> tuple[FragmentInfo, ...]:
        """Write packs and fragments of ``attempt``; what the record says of them. Takes memory for some fragments and for four
        packs, coded and decoded. ``Damaged`` if a chunk is not as it was written."""
        infos, rows, rounded = list[FragmentInfo](), list[Chunk](), defaultdict[str, list[Rounded]](list)

        def work(part: PlannedPack | _Kept) -> tuple[_Kept | None, list[Chunk], list[tuple[str, Rounded]]]:
            return (part, [], []) if isinstance(part, _Kept) else (None, *self._write(part, attempt, progress))

        with ThreadPoolExecutor(_AT_ONCE, "raystow-rewrite") as pool:
            for kept, written, found in bounded_map(pool, work, self._parts(), cost=lambda part: part.cost, limit=_MEMORY):
                rows += written
                for name, one in found:
                    rounded[name].append(one)
                if kept is None:
                    continue
                anew = {name: together(some) for name, some in rounded.items()}
                fragment = replace(kept.fragment, chunks=tuple(rows), rounded={**kept.fragment.rounded, **anew})
                data = fragment.dump()
                self.version.store.put(keys.fragment(self.version.id, attempt, fragment.node), [data])
                infos.append(fragment.info(data, kept.info.ranks, kept.info.stall))
                rows.clear()
                rounded.clear()
        return tuple(infos)

    def _fragments(self) -> Iterator[tuple[_Kept, list[PlannedPack]]]:
        """The rows of each node that are kept, and the new packs."""
        for info, fragment in self.version.walk():
            chunks = tuple(chunk for chunk in fragment.chunks if self._keeps(chunk.name))
            values = tuple(value for value in fragment.values if self._keeps(value.name))
            rounded = {name: one for name, one in fragment.rounded.items() if self._keeps(name)}
            packs = _packs(fragment.node, bundles(chunks, self._anew, self._rounds, self.bits))
            yield _Kept(info, replace(fragment, chunks=chunks, values=values, rounded=rounded)), list(packs)

    def _parts(self) -> Iterator[PlannedPack | _Kept]:
        for kept, packs in self._fragments():
            yield from packs
            yield kept

    def _keeps(self, name: str) -> bool:
        return not self.weights_only or group(name) == WEIGHTS

    def _anew(self, chunk: Chunk) -> bool:
        to, now = self.base.id if self.base is not None else None, chunk.coding.base
        return self.recode and now != to and (now is not None or chunk.decoded >= delta.LEAST)

    def _rounds(self, chunk: Chunk) -> bool:
        large = chunk.nbytes > 0 and math.prod(chunk.shape) * dtypes.dtype(chunk.dtype).itemsize >= _LEAST
        more = self.bits is not None and dtypes.MANTISSA.get(chunk.dtype, 0) > self.bits
        return more and large and len(chunk.shape) > 1 and chunk.name not in self._rounded_before

    @functools.cached_property
    def _rounded_before(self) -> Collection[str]:
        return self.version.rounded().keys()

    def _write(self, pack: PlannedPack, attempt: str, progress: Progress) -> tuple[list[Chunk], list[tuple[str, Rounded]]]:
        """The rows of a pack, and the errors of rounding by tensor name. References alone make no pack."""
        parts, rows, rounded, end = list[Buffer](), list[Chunk](), list[tuple[str, Rounded]](), 0
        for bundle, owner, stored, found in self._coded(pack.bundles):
            parts.append(stored)
            for row in bundle.rows:
                row = structs.replace(row, pack=pack.number, start=end, coding=owner.coding, stored_digest=owner.stored_digest)
                rows.append(row if found is None else structs.replace(row, raw_digest=owner.raw_digest))
                rounded += [] if found is None else [(row.name, found)]
            end += owner.coding.size
            progress(bundle.read)
        if not all(row.is_reference for row in rows):
            self.version.store.put(keys.pack(self.version.id, attempt, pack.node, pack.group, pack.number), parts)
        return rows, rounded

    def _coded(self, bundles: Sequence[Bundle]) -> Iterator[tuple[Bundle, Chunk, Buffer, Rounded | None]]:
        """Each bundle with its first row as coded, the bytes to store, and the errors of rounding."""
        reader = self.version.reader(threads=1)
        same = [bundle for bundle in bundles if bundle.source is None]
        yield from ((bundle, bundle.rows[0], b"", None) for bundle in same if bundle.rows[0].is_reference)
        copied = {id(bundle.rows[0]): bundle for bundle in same if not bundle.rows[0].is_reference}
        for run in reader.whole(bundle.rows[0] for bundle in copied.values()):
            data = memoryview(run.fetch(reader.read))
            for piece in run.pieces:
                yield copied[id(piece.chunk)], piece.chunk, run.stored(piece, data), None
        encoder = ChunkEncoder(max((bundle.nbytes for bundle in bundles if bundle.source is not None), default=0))
        for bundle in bundles:
            if bundle.source is not None:
                stored, owner, found = self._recoded(encoder, *_recoding(bundle))
                yield bundle, owner, stored.data, found

    def _recoded(self, encoder: ChunkEncoder, source: Chunk, row: Chunk, bits: int | None) -> tuple[Bytes, Chunk, Rounded | None]:
        raw, dtype, former = _elements(self.version, source), dtypes.dtype(source.dtype), self._former(source)
        coded = found = None
        if bits is not None:
            found = round_to_nearest(raw, source.dtype, bits)
            row = structs.replace(row, raw_digest=raw_digest(raw))
        if self.base is not None and former is not None:
            coded = delta.encode(encoder, raw, dtype, former.copy(), self.base.id)
        stored, coding = coded or encoder.encode(raw, dtype)
        row = structs.replace(row, coding=coding, stored_digest=stored_digest(stored))
        decode(row, stored, base=former)  # checked now: its source will be deleted
        return stored, row, found

    def _former(self, chunk: Chunk) -> Bytes | None:
        """The elements of the same chunk in the base, if there is one."""
        if self.base is None:
            return None
        same = self.base.chunk(chunk.name, chunk.box, near=self.version.manifest.first_rank(chunk.node))
        if same is None:
            return None
        return _elements(self.base, same) if (same.shape, same.dtype) == (chunk.shape, chunk.dtype) else None


def _recoding(bundle: Bundle) -> tuple[Chunk, Chunk, int | None]:
    assert bundle.source is not None
    return bundle.source, bundle.rows[0], bundle.bits


def _elements(version: Version, chunk: Chunk) -> Bytes:
    raw = np.empty(chunk.extent, f"V{dtypes.dtype(chunk.dtype).itemsize}")
    version.reader(threads=1).fill([Request(chunk.name, [chunk], chunk.box, raw)])
    return raw.reshape(-1).view(np.uint8)


def plan(
    version: Version,
    base: Version | None,
    *,
    weights_only: bool = False,
    recode: bool = True,
    bits: int | None = None,
) -> Rewriting:
    """Plan to write a version again, with chunks that are deltas to ``base``, where that is smaller, or to none.

    Unless ``recode``, chunks keep their base. ``bits``: matrices that were not rounded before are rounded to so many mantissa
    bits. Reads record and manifest.
    """
    rewriting = Rewriting(version, base, weights_only, recode, bits)
    _ = rewriting.estimate  # what cannot be read fails before anything is written
    return rewriting


def bundles(
    chunks: Iterable[Chunk], anew: Ask = lambda chunk: False, rounds: Ask = lambda chunk: False, bits: int | None = None
) -> Iterator[Bundle]:
    """Rows grouped by the bytes that they share. ``anew``: whether a row with bytes of its own is coded anew. ``rounds``: whether
    a row is rounded."""
    places: dict[tuple[object, ...], list[Chunk]] = defaultdict(list)
    for chunk in chunks:
        reference = (chunk.group, chunk.source, *chunk.box)
        place = (chunk.group, chunk.pack, chunk.start, chunk.coding.size)
        places[reference if chunk.is_reference else place].append(chunk)
    for same in places.values():
        owners = [chunk for chunk in same if chunk.derivation is None]  # empty tensors share a place
        rest = [chunk for chunk in same if chunk.derivation is not None]
        if any(map(rounds, same)):  # what is derived from exact numbers is not derived from rounded ones
            owners, rest = [], same
        elif not owners:  # a copy takes over the bytes
            owners = [chunk for chunk in rest if chunk.words.name == chunk.dtype][:1]
            rest = [chunk for chunk in rest if chunk not in owners]
        if owners:
            for owner in (*owners[1:], owners[0]):
                moved = owner.derivation is not None and owner.coding.base is not None  # in the base the chunk has another name
                yield _bundle(owner, rest if owner is owners[0] else (), recoded=moved or anew(owner))
            continue
        for _, alike in itertools.groupby(sorted(rest, key=lambda chunk: chunk.dtype), lambda chunk: chunk.dtype):
            source, *copies = of = list(alike)
            yield _bundle(source, copies, recoded=True, bits=bits if all(map(rounds, of)) else None)


def _bundle(owner: Chunk, derived: Iterable[Chunk], *, recoded: bool, bits: int | None = None) -> Bundle:
    """A row that owns its stored bytes from now on, and those that are derived from it."""
    derivation = Derivation(owner.name, owner.dtype)
    rows = (structs.replace(owner, derivation=None), *(structs.replace(row, derivation=derivation) for row in derived))
    return Bundle(rows, owner if recoded else None, bits)


def _packs(node: int, bundles: Iterable[Bundle]) -> Iterator[PlannedPack]:
    """Packs of bounded size, one group each, with bundles in the order in which they are read."""
    ordered = sorted(bundles, key=lambda bundle: (bundle.rows[0].group, bundle.rows[0].pack, bundle.rows[0].start))
    for name, of in itertools.groupby(ordered, lambda bundle: bundle.rows[0].group):
        for number, full in enumerate(batches(of, lambda bundle: bundle.nbytes, PACK_BYTES)):
            yield PlannedPack(node, name, number, tuple(full))
