"""Reads boxes of tensors from packs: coalesced ranges, several in parallel, every digest checked before bytes are used."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from ..coding import chunk as chunks
from ..coding.derived import derive
from ..coding.digest import raw_digest, stored_digest
from ..coding.dtypes import DType
from ..coding.kernels import Bytes
from ..errors import Damaged, NotFound, StateError, Unsupported
from ..format import keys
from ..format.boxes import Box, overlap, tile, within
from ..format.manifest import Chunk
from ..object_store import Buffer, ObjectStore

_RUN = 16 << 20  # bytes; adjacent chunks are fetched together up to this
_GAP = 64 << 10  # bytes; a hole of this size costs less than another request

Target: TypeAlias = Any
"""A numpy array, or a torch tensor on a GPU."""
Stored = TypeVar("Stored", memoryview, Bytes)

_Pack = tuple[int, str, int, str, int]  # version, attempt, node, group, number


@dataclass(frozen=True)
class Request:
    """A box of one tensor to read into ``target`` (shape: the box's extent; any strides; items of the dtype's size): a numpy
    array, or for ``workers.gpu.decode.decoder`` a torch tensor of words on a GPU. ``chunks``: at least the rows that overlap the
    box."""

    name: str
    chunks: Sequence[Chunk]
    box: Box
    target: Target


class Piece(NamedTuple):
    """The part of a chunk that a request reads, if any, and its target. ``direct``: it is the whole chunk. ``base``: what else is
    fetched, if the chunk is a delta."""

    chunk: Chunk
    source: tuple[slice, ...] = ()
    target: Target = None
    direct: bool = False
    base: Run | None = None


class Place(NamedTuple):
    """``size`` stored bytes in a run, and the pieces that are decoded from them: of a tensor, and of those derived from it. They
    decode to ``decoded`` bytes of ``words``."""

    pieces: list[Piece]
    size: int
    words: DType
    decoded: int

    @property
    def chunk(self) -> Chunk:
        """The first piece's chunk."""
        return self.pieces[0].chunk

    @property
    def base(self) -> Run | None:
        """What the stored bytes are a delta to, if they are one."""
        return self.pieces[0].base

    def holds(self, chunk: Chunk) -> bool:
        """Whether these are the stored bytes of another chunk of the pack."""
        first = self.chunk
        if chunk.start != first.start:
            return False
        return (chunk.coding, chunk.words, chunk.decoded) == (first.coding, self.words, self.decoded)


@dataclass(frozen=True)
class Run:
    """Pieces of one pack that are fetched together: ``length`` bytes of the object ``key`` from ``start``."""

    key: str
    start: int
    length: int
    pieces: tuple[Piece, ...]

    @property
    def cost(self) -> int:
        """Bytes of memory for reading, decoding and checking: stored bytes, one chunk, its planes, what is derived from it, and
        its base."""
        return self.length + max(map(_cost, self.pieces))

    @property
    def bases(self) -> Iterator[Run]:
        """What else is fetched, of other versions."""
        if all(piece.base is None for piece in self.pieces):
            return  # the common case
        for place in self.places:
            if (base := place.base) is not None:
                yield base
                yield from base.bases

    @property
    def nbytes(self) -> int:
        """Bytes that are fetched in all."""
        return self.length + sum(base.length for base in self.bases)

    @property
    def version(self) -> int:
        """The id of the version that the pack belongs to."""
        found = keys.attempt_of(self.key)
        assert found is not None
        return found[0]

    @functools.cached_property
    def places(self) -> list[Place]:
        """The places of the pieces; pieces with the same stored bytes share one."""
        places = list[Place]()
        for piece in self.pieces:
            chunk = piece.chunk
            if places and places[-1].holds(chunk):
                places[-1].pieces.append(piece)
            else:
                places.append(Place([piece], chunk.coding.size, chunk.words, chunk.decoded))
        return places

    def stored(self, piece: Piece, data: Stored) -> Stored:
        """The bytes of one piece's chunk in the fetched data."""
        begin = piece.chunk.start - self.start
        return data[begin : begin + piece.chunk.coding.size]

    @contextlib.contextmanager
    def naming(self, piece: Piece) -> Iterator[None]:
        """Add pack and tensor to errors."""
        try:
            yield
        except (Damaged, Unsupported) as error:
            chunk = piece.chunk
            what = f"tensor {chunk.name!r}, bytes {chunk.start} + {chunk.coding.size}: {error.what}"
            raise type(error)(what, subject=self.key, remedy=error.remedy) from error

    @contextlib.contextmanager
    def needing(self, piece: Piece) -> Iterator[None]:
        """Add to errors of a base which chunk needs it."""
        try:
            yield
        except (Damaged, Unsupported) as error:
            what = f"{error.what}; {piece.chunk.name!r} of version {self.version} is a delta to it"
            raise type(error)(what, subject=error.subject, remedy=error.remedy) from error


class BaseChunks(Protocol):
    """Finds the chunks of earlier versions that a version needs."""

    def run(self, chunk: Chunk) -> Run:
        """What must be fetched for a chunk that is a delta."""

    def referenced(self, chunk: Chunk) -> tuple[PackReader, Chunk]:
        """The row of a reference with the place and coding of the bytes that it refers to, and the reader of their version."""


class PackReader:
    """Reads from the packs of one version. ``bases``: finds chunks of other versions. ``threads``: parallel requests and
    decodings. ``turn``: the part of the runs, from 0 to 1, that comes last instead of first, so that ranks that share reads begin
    differently."""

    def __init__(
        self,
        store: ObjectStore,
        version: int,
        attempt: str,
        *,
        bases: BaseChunks,
        threads: int | None = None,
        turn: float = 0.0,
    ) -> None:
        self._store, self._version, self._attempt, self._bases, self._turn = store, version, attempt, bases, turn
        self._range_bytes: int = getattr(store, "range_bytes", _RUN)
        # Threads that wait for a network leave cores free; those that read files do not, and only contend for the GIL.
        per_core = 2 if self._range_bytes == _RUN else 1
        self.threads = threads or min(16, per_core * (os.cpu_count() or 1))

    def fill(self, requests: Iterable[Request], progress: Callable[[int], None] = lambda nbytes: None) -> None:
        """Fill every request's target; see ``complete``."""
        self.complete(self.runs(requests), progress)

    def complete(self, runs: Sequence[Run], progress: Callable[[int], None] = lambda nbytes: None) -> None:
        """Fill the targets of ``runs``; ``progress`` is called with the decoded bytes of each chunk.

        Raises ``Damaged`` naming pack and tensor, ``StateError`` if a target was changed while it was filled, or the store's
        error; then the content of the targets is undefined. Takes 16
        MiB of stored bytes and one chunk for each thread, of which the caller's is one.
        """
        # Of a file, smaller ranges: they take less memory, and are as fast.
        if self._range_bytes < _RUN:
            runs = [part for run in runs for part in _coalesced(run.key, run.pieces, self._range_bytes)]
        threads = max(1, min(self.threads, len(runs)))
        left = deque[Run | None]([*runs, *[None] * threads])
        longest = max((run.length for run in runs), default=0)

        def work() -> None:
            memory = np.empty(longest, np.uint8).data  # for all runs: pages of new memory cost as much as a copy
            try:
                while (run := left.popleft()) is not None:
                    self._decode(run, progress, memory[: run.length])
            except BaseException:
                left.extendleft([None] * threads)  # ends the other threads
                raise

        with ThreadPoolExecutor(threads, "raystow-read") as pool:
            others = [pool.submit(work) for _ in range(threads - 1)]
            work()
        for other in others:
            other.result()

    def check(self, runs: Sequence[Run], progress: Callable[[int], None], *, memory: int) -> Iterator[Run]:
        """Read and decode runs and check each chunk's digests; yields each whole run, in order. As many threads read as fit into
        ``memory`` bytes, at least one."""
        fitting = memory // max([1, *(run.cost for run in runs)])  # empty tensors take none

        def decoded(run: Run) -> Run:
            self._decode(run, progress)
            return run

        if len(runs) < 2:
            yield from map(decoded, runs)
            return
        with ThreadPoolExecutor(max(1, min(self.threads, fitting, len(runs))), "raystow-read") as pool:
            yield from pool.map(decoded, runs)  # an error, or the caller's end, cancels the rest

    def whole(self, parts: Iterable[Chunk]) -> list[Run]:
        """The runs to fetch to read chunks whole."""
        return self._runs([self._piece(chunk) for chunk in parts])

    def runs(self, requests: Iterable[Request]) -> list[Run]:
        """The runs to fetch to fill the requests. Raises ``Damaged`` unless the manifest's chunks tile each of them."""
        pieces = list[tuple[_Pack, Piece]]()
        for request in requests:
            parts = list[Box]()
            for chunk in request.chunks:
                part = overlap(request.box, box := chunk.box)
                if part is not None:
                    target = request.target if part == request.box else request.target[within(part, request.box) + (...,)]
                    source = () if part == box else within(part, box)
                    pieces.append(self._piece(chunk, source, target, part == box))
                    parts.append(part)
            if not tile(parts, request.box):
                what = f"the manifest's chunks do not hold each element of the box {request.box} exactly once"
                raise Damaged(what, subject=request.name)
        return self._runs(pieces)

    def fetch(self, run: Run, into: memoryview | None = None) -> Buffer:
        """A run's bytes, in new memory or ``into``, each chunk checked against the digest of its stored bytes. Wrong bytes are
        fetched a second time: they may have been changed in transit."""
        try:
            return self._fetch(run, into)
        except Damaged:
            return self._fetch(run, into)

    def elements(
        self,
        run: Run,
        into: Callable[[Piece], Bytes | None] = lambda piece: None,
        *,
        memory: memoryview | None = None,
        proven: bool = True,
    ) -> Iterator[tuple[Piece, Bytes]]:
        """A run's pieces, each with the bytes of its chunk's elements, fetched and checked. ``into``: memory to decode into, if
        the elements are what is stored; ``StateError`` if it was changed meanwhile. ``memory``: for the run's stored bytes.
        ``proven``: see ``decode``."""
        data = np.frombuffer(self.fetch(run, memory), np.uint8)
        for place in run.places:
            words: Bytes | None = None
            base, in_place = self._needed(run, place.pieces[0]), False
            for piece in place.pieces:
                with run.naming(piece):
                    stored, target = run.stored(piece, data), into(piece)
                    in_place = in_place or (words is None and target is not None)
                    try:
                        words, raw = decode(piece.chunk, stored, words, into=target, base=base, proven=proven)
                    except Damaged:
                        if not in_place:
                            raise
                        decode(piece.chunk, stored, base=base, proven=proven)  # in memory that nobody else can change
                        raise changed_target(piece) from None
                yield piece, raw

    def bring(self, run: Run, into: memoryview | None) -> Buffer:
        """``fetch`` without checks, for callers that check the digests themselves."""
        try:
            if into is None:
                return self._store.get_range(run.key, run.start, run.length)
            self._store.get_range_into(run.key, run.start, into)
            return into
        except NotFound:
            raise Damaged("the pack is missing", subject=run.key) from None

    def _fetch(self, run: Run, into: memoryview | None) -> Buffer:
        data = self.bring(run, into)
        for place in run.places:
            found = stored_digest(run.stored(place.pieces[0], memoryview(data)))
            for piece in place.pieces:
                with run.naming(piece):
                    if found != piece.chunk.stored_digest:
                        raise Damaged("the stored bytes do not match their digest")
        return data

    def _piece(
        self, chunk: Chunk, source: tuple[slice, ...] = (), target: Target = None, direct: bool = False
    ) -> tuple[_Pack, Piece]:
        """A piece, and the pack of its bytes: of a reference that of another version."""
        reader = self
        if chunk.is_reference:
            reader, chunk = self._bases.referenced(chunk)
        base = None if chunk.coding.base is None else reader._bases.run(chunk)
        pack = reader._version, reader._attempt, chunk.node, chunk.group, chunk.pack
        return pack, Piece(chunk, source, target, direct, base)

    def _runs(self, pieces: list[tuple[_Pack, Piece]]) -> list[Run]:
        packs: dict[_Pack, list[Piece]] = defaultdict(list)
        for pack, piece in pieces:
            packs[pack].append(piece)
        runs = [run for pack, of in sorted(packs.items()) for run in _coalesced(keys.pack(*pack), of)]
        first = int(len(runs) * self._turn)
        return runs[first:] + runs[:first]

    def _decode(self, run: Run, progress: Callable[[int], None], memory: memoryview | None = None) -> None:
        """Read a run, check it, and fill the targets of its pieces. ``memory``: for its stored bytes."""
        for piece, raw in self.elements(run, _own_memory, memory=memory):
            chunk, target = piece.chunk, piece.target
            # Bounds are compared, within which a strided target may have the memory of another target.
            if target is not None and not (target.flags.c_contiguous and np.may_share_memory(raw, target)):
                target[...] = raw.view(target.dtype).reshape(chunk.extent)[piece.source]
            progress(chunk.nbytes)

    def _needed(self, run: Run, piece: Piece) -> Bytes | None:
        """The words that a piece's words are deltas to, if they are."""
        if piece.base is None:
            return None
        with run.needing(piece):
            ((_, raw),) = self.elements(piece.base, proven=False)
        return raw


def _coalesced(key: str, pieces: Sequence[Piece], most: int = _RUN) -> Iterator[Run]:
    """The pieces of one pack in runs of one request each, of ``most`` bytes unless one chunk is larger.

    A run is one thread's work, so the bytes of bases count as well.
    """
    run, begin, end, beneath = list[Piece](), 0, 0, 0
    chunks = ((piece.chunk, piece) for piece in pieces)
    places = (((chunk.start, chunk.coding.size, chunk.derivation is not None), piece) for chunk, piece in chunks)
    for (start, size, _), piece in sorted(places, key=operator.itemgetter(0)):
        again = bool(run) and start == run[-1].chunk.start  # the same bytes: of what is derived from another piece
        more = 0 if again or piece.base is None else piece.base.nbytes
        if run and not again and (start > end + _GAP or start + size - begin + beneath + more > most):
            yield Run(key, begin, end - begin, tuple(run))
            run = []
        if not run:
            begin, end, beneath = start, start, 0
        run.append(piece)
        beneath += more
        end = max(end, start + size)
    if run:
        yield Run(key, begin, end - begin, tuple(run))


def _cost(piece: Piece) -> int:
    chunk = piece.chunk
    derived, base = chunk.nbytes if chunk.derivation else 0, piece.base.cost if piece.base else 0
    return 2 * chunk.decoded + derived + base


def decode(
    chunk: Chunk,
    stored: Bytes,
    words: Bytes | None = None,
    *,
    into: Bytes | None = None,
    base: Bytes | None = None,
    proven: bool = True,
) -> tuple[Bytes, Bytes]:
    """The words that a chunk's stored bytes decode to, and its elements' bytes, checked against their digest. ``words``: if they
    are known. ``into``: memory to decode into, if the elements are these words. ``base``: the bytes that the words are deltas to.
    Unless ``proven`` that digest is not checked: of a base, whose deltas' own digests prove it."""
    if words is None:
        words = into if into is not None and chunk.words.name == chunk.dtype else np.empty(chunk.decoded, np.uint8)
        chunks.decode(chunk.coding, chunk.words, stored, words, base)
    raw = derive(words, chunk.words.name, chunk.dtype)
    if proven and raw_digest(raw) != chunk.raw_digest:
        raise Damaged("the decoded bytes do not match their digest")
    return words, raw


def changed_target(piece: Piece) -> StateError:
    """The error for a target that does not have what was decoded into it, although the stored bytes are right."""
    remedy = "let nothing write to it until the restore has ended, and restore again"
    return StateError("its memory was changed while it was filled", subject=f"tensor {piece.chunk.name!r}", remedy=remedy)


def _own_memory(piece: Piece) -> Bytes | None:
    """Where a piece's elements go, if they are all of the chunk, contiguous."""
    target = piece.target
    return target.reshape(-1).view(np.uint8) if piece.direct and target.flags.c_contiguous else None
