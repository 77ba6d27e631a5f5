"""Rewriting: writes some of a version's tensors once more, as another attempt at the same id. Plan, then execute.

Stored bytes that can stay are copied as they are coded, with their digests, which are checked on the way. What is derived from a
tensor that goes (weights are their master copy, rounded) is decoded, and coded as what it is: as a difference, if the version has
been one, to the same. Or all is coded anew, as differences to another version; or what is a difference is, and whole. Boxes stay,
and so does every bit, unless numbers are to be rounded: then what follows from them is stored itself.

Writes packs and fragments, and nothing that makes a version of them: that is the part of ``replacing``.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from ..coding import delta, dtypes
from ..coding.chunk import Encoder
from ..coding.derived import Derivation
from ..coding.digest import raw_digest, stored_digest
from ..coding.kernels import Bytes
from ..coding.nearest import round_to_nearest
from ..coding.rounded import Rounded
from ..format import keys
from ..format.manifest import Chunk, Fragment
from ..format.version_record import FragmentInfo, PackInfo
from ..object_store import Buffer, ObjectStore
from ..reader import Request, decode
from ..version import Version

_PACK = 64 << 20  # bytes
_AT_ONCE = 4  # packs

_LEAST = 4096  # bytes of a tensor that is rounded, as with ``lossy=``

Progress = Callable[[int], None]
Ask = Callable[[Chunk], bool]


@dataclass(frozen=True)
class Bundle:
    """Rows of the same stored bytes. ``rows``: as they will be, but for where the bytes lie; it is the first row's tensor that
    they are the bytes of. ``source``: this row as it is now, if it must be decoded and coded anew. ``bits``: of mantissa, to
    which its numbers are rounded then."""

    rows: tuple[Chunk, ...]
    source: Chunk | None = None
    bits: int | None = None

    @property
    def nbytes(self) -> int:
        """In the pack; of what is coded anew, if that does not make it smaller."""
        return self.rows[0].coding.size if self.source is None else self.source.nbytes

    @property
    def read(self) -> int:
        """Stored bytes that are read for it."""
        return self.rows[0].coding.size

    def likely(self, *, difference: bool) -> int:
        """As ``nbytes``, but of what is rounded what such numbers usually take, a sign, three bits of exponent, and these; and of
        what is coded anew as a ``difference`` half."""
        if self.source is None:
            return self.nbytes
        rounded = self.nbytes if self.bits is None else self.nbytes * (self.bits + 4) // (8 * self.rows[0].words.itemsize)
        return rounded // 2 if difference else rounded


@dataclass(frozen=True)
class Load:
    """What goes into one pack, in this order."""

    node: int
    group: str
    number: int
    bundles: tuple[Bundle, ...]


@dataclass(frozen=True)
class Rewriting:
    """``fragments``: the rows that stay, of each node, and what the record says of them now. ``base``: what the version is to be
    a difference to, if it is to be one."""

    version: Version
    base: Version | None
    store: ObjectStore
    fragments: tuple[tuple[FragmentInfo, Fragment], ...]
    loads: tuple[Load, ...]

    @property
    def read(self) -> int:
        """Stored bytes to read."""
        return sum(bundle.read for load in self.loads for bundle in load.bundles)

    @property
    def stored(self) -> int:
        """Stored bytes that come of it: about, since what is coded anew is counted before coding."""
        difference = self.base is not None
        return sum(bundle.likely(difference=difference) for load in self.loads for bundle in load.bundles)

    def execute(
        self, attempt: str, progress: Progress = lambda nbytes: None
    ) -> tuple[tuple[FragmentInfo, ...], tuple[PackInfo, ...]]:
        """Write packs and fragments of ``attempt``; what its record is to say of them. ``progress`` is told the stored bytes that
        were read.

        ``Damaged`` names what is not as it was written; or the store's error. Memory: the manifest, and four packs, coded and
        decoded.
        """
        packs, rows, rounded = list[PackInfo](), defaultdict[int, list[Chunk]](list), defaultdict[int, dict[str, Rounded]](dict)
        with ThreadPoolExecutor(_AT_ONCE, "raystow-rewrite") as pool:
            try:
                for info, written, found in pool.map(lambda load: self._write(load, attempt, progress), self.loads):
                    packs.append(info)
                    rows[info.node] += written
                    for name, one in found:
                        before = rounded[info.node].get(name)
                        rounded[info.node][name] = one if before is None else before | one
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        infos = []
        for old, fragment in self.fragments:
            done = {**fragment.rounded, **rounded[fragment.node]}
            fragment = replace(fragment, chunks=tuple(rows[fragment.node]), rounded=done)
            data = fragment.dump()
            self.store.put(keys.fragment(self.version.id, attempt, fragment.node), [data])
            infos.append(fragment.info(data, old.ranks, old.stall))
        return tuple(infos), tuple(packs)

    def _write(self, load: Load, attempt: str, progress: Progress) -> tuple[PackInfo, list[Chunk], list[tuple[str, Rounded]]]:
        """The rows of a pack, and what rounding has done to any of them, by the tensor's name."""
        parts, rows, rounded, end = list[Buffer](), list[Chunk](), list[tuple[str, Rounded]](), 0
        for bundle, owner, stored, found in self._coded(load.bundles):
            parts.append(stored)
            for row in bundle.rows:
                row = replace(row, pack=load.number, start=end, coding=owner.coding, stored_digest=owner.stored_digest)
                rows.append(row if found is None else replace(row, raw_digest=owner.raw_digest))
                rounded += [] if found is None else [(row.name, found)]
            end += owner.coding.size
            progress(bundle.read)
        self.store.put(keys.pack(self.version.id, attempt, load.node, load.group, load.number), parts)
        return PackInfo(load.node, load.group, load.number, end), rows, rounded

    def _coded(self, bundles: Sequence[Bundle]) -> Iterator[tuple[Bundle, Chunk, Buffer, Rounded | None]]:
        """The first row of each, with its coding and digests, the bytes to store, and what rounding has done to it."""
        reader = self.version.reader(threads=1)
        copied = {id(bundle.rows[0]): bundle for bundle in bundles if bundle.source is None}
        for run in reader.whole(bundle.rows[0] for bundle in copied.values()):
            data = memoryview(reader.fetch(run))
            for piece in run.pieces:
                yield copied[id(piece.chunk)], piece.chunk, run.stored(piece, data), None
        encoder = Encoder(max((bundle.nbytes for bundle in bundles if bundle.source is not None), default=0))
        for bundle in bundles:
            if (source := bundle.source) is not None:
                stored, owner, found = self._recoded(encoder, source, bundle.rows[0], bundle.bits)
                yield bundle, owner, stored.data, found

    def _recoded(self, encoder: Encoder, source: Chunk, row: Chunk, bits: int | None) -> tuple[Bytes, Chunk, Rounded | None]:
        raw, dtype, former = _elements(self.version, source), dtypes.dtype(source.dtype), self._former(source)
        difference = found = None
        if bits is not None:
            found = round_to_nearest(raw, source.dtype, bits)
            row = replace(row, raw_digest=raw_digest(raw))
        if self.base is not None and former is not None:
            difference = delta.encode(encoder, raw, dtype, former.copy(), self.base.id)
        stored, coding = difference or encoder.encode(raw, dtype)
        row = replace(row, coding=coding, stored_digest=stored_digest(stored))
        decode(row, stored, base=former)  # what it was made from will be gone when somebody reads it
        return stored, row, found

    def _former(self, chunk: Chunk) -> Bytes | None:
        """The elements of the same chunk in the base, if it has that."""
        if self.base is None or (same := self.base.chunk(chunk.name, chunk.box, near=chunk.node)) is None:
            return None
        return _elements(self.base, same) if (same.shape, same.dtype) == (chunk.shape, chunk.dtype) else None


def _elements(version: Version, chunk: Chunk) -> Bytes:
    raw = np.empty(chunk.extent, f"V{dtypes.dtype(chunk.dtype).itemsize}")
    version.reader(threads=1).fill([Request(chunk.name, [chunk], chunk.box, raw)])
    return raw.reshape(-1).view(np.uint8)


def _all(name: str) -> bool:
    return True


def _never(chunk: Chunk) -> bool:
    return False


def plan(version: Version, store: ObjectStore, wanted: Callable[[str], bool] = _all) -> Rewriting:
    """What must be read and written to keep the tensors and values whose names are ``wanted``. What is a difference stays one, to
    the same. Reads record and manifest."""
    bases = version.record.bases  # a save makes differences to one version
    return _plan(version, store, wanted, version.bases.version(bases[0]) if len(bases) == 1 else None, _never)


def plan_onto(
    version: Version,
    store: ObjectStore,
    base: Version | None,
    wanted: Callable[[str], bool] = _all,
    bits: int | None = None,
) -> Rewriting:
    """The same, to make all of it differences to ``base``, where that pays, and to no other version; or whole without one.
    ``bits``: numbers are rounded to so many bits of mantissa, but for those of vectors and of what has been rounded before."""
    to = base.id if base is not None else None

    def anew(chunk: Chunk) -> bool:
        return chunk.coding.base != to and (chunk.coding.base is not None or chunk.decoded >= delta.LEAST)

    return _plan(version, store, wanted, base, anew, bits)


def _plan(
    version: Version,
    store: ObjectStore,
    wanted: Callable[[str], bool],
    base: Version | None,
    anew: Ask,
    bits: int | None = None,
) -> Rewriting:
    before = version.rounded() if bits is not None else {}

    def rounds(chunk: Chunk) -> bool:
        large = chunk.nbytes > 0 and math.prod(chunk.shape) * dtypes.dtype(chunk.dtype).itemsize >= _LEAST
        more = bits is not None and dtypes.MANTISSA.get(chunk.dtype, 0) > bits
        return more and large and len(chunk.shape) > 1 and chunk.name not in before

    fragments, loads = list[tuple[FragmentInfo, Fragment]](), list[Load]()
    for info, fragment in zip(version.record.fragments, version.fragments, strict=True):
        chunks = tuple(chunk for chunk in fragment.chunks if wanted(chunk.name))
        values = tuple(value for value in fragment.values if wanted(value.name))
        rounded = {name: one for name, one in fragment.rounded.items() if wanted(name)}
        fragments.append((info, replace(fragment, chunks=chunks, values=values, rounded=rounded)))
        loads += _loads(fragment.node, _bundles(chunks, anew, rounds, bits))
    return Rewriting(version, base, store, tuple(fragments), tuple(loads))


def _bundles(chunks: Iterable[Chunk], anew: Ask = _never, rounds: Ask = _never, bits: int | None = None) -> Iterator[Bundle]:
    """The rows that stay, by the bytes that they need. ``anew``: which of those that have bytes of their own are coded anew.
    ``rounds``: which are rounded."""
    places: dict[tuple[str, int, int, int], list[Chunk]] = defaultdict(list)
    for chunk in chunks:
        places[chunk.group, chunk.pack, chunk.start, chunk.coding.size].append(chunk)
    for same in places.values():
        owners = [chunk for chunk in same if chunk.derivation is None]  # of empty tensors many lie in one place
        rest = [chunk for chunk in same if chunk.derivation is not None]
        if any(map(rounds, same)):  # what follows from these numbers would not follow from others
            owners, rest = [], same
        elif not owners:  # the bytes are those of a copy, too
            owners = [chunk for chunk in rest if chunk.words.name == chunk.dtype][:1]
            rest = [chunk for chunk in rest if chunk not in owners]
        if owners:
            yield from (_owning(owner, (), anew) for owner in owners[1:])
            yield _owning(owners[0], rest, anew)
            continue
        for _, alike in itertools.groupby(sorted(rest, key=lambda chunk: chunk.dtype), lambda chunk: chunk.dtype):
            source, *copies = of = list(alike)
            made = replace(source, derivation=None)
            yield Bundle((made, *_from(made, copies)), source, bits if all(map(rounds, of)) else None)


def _owning(owner: Chunk, rest: Iterable[Chunk], anew: Ask) -> Bundle:
    """A row that has the stored bytes, and those that follow from it."""
    made = replace(owner, derivation=None)
    moved = owner.derivation is not None and owner.coding.base is not None  # what it is a difference to has another name there
    return Bundle((made, *_from(made, rest)), owner if moved or anew(owner) else None)


def _from(owner: Chunk, rows: Iterable[Chunk]) -> Iterator[Chunk]:
    return (replace(row, derivation=Derivation(owner.name, owner.dtype)) for row in rows)


def _loads(node: int, bundles: Iterable[Bundle]) -> Iterator[Load]:
    """Bundles in packs of some size, each group's in packs of its own. They are read in the order in which they lie."""
    groups: dict[str, list[Bundle]] = defaultdict(list)
    for bundle in sorted(bundles, key=lambda bundle: (bundle.rows[0].pack, bundle.rows[0].start)):
        groups[bundle.rows[0].group].append(bundle)
    for group, of in sorted(groups.items()):
        full, size, number = list[Bundle](), 0, 0
        for bundle in of:
            if full and size + bundle.nbytes > _PACK:
                yield Load(node, group, number, tuple(full))
                full, size, number = [], 0, number + 1
            full.append(bundle)
            size += bundle.nbytes
        yield Load(node, group, number, tuple(full))
