"""Reads boxes of tensors out of packs: coalesced ranges, several at a time, every digest checked before a byte is believed."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .coding import chunk as chunks
from .coding.derived import derive
from .coding.digest import raw_digest, stored_digest
from .coding.dtypes import DType
from .coding.kernels import Bytes
from .errors import Damaged, NotFound, Unsupported
from .format import keys
from .format.boxes import Box, overlap, tile, within
from .format.manifest import Chunk
from .object_store import Buffer, ObjectStore

_RUN = 16 << 20  # bytes; adjacent chunks are fetched together up to here
_GAP = 64 << 10  # bytes; a hole of this size costs less than another request


@dataclass(frozen=True)
class Request:
    """Fill ``target`` (shape: the box's extent; any strides; items of the dtype's size) with the box of one tensor. It is a numpy
    array, or for ``workers.cuda.decoding.decoder`` a torch tensor of words on a GPU.

    ``chunks``: the tensor's rows, or at least those that overlap the box.
    """

    name: str
    chunks: Sequence[Chunk]
    box: Box
    target: Any


class Piece(NamedTuple):
    """The part of a chunk that one request wants, if any, and where it goes. ``direct``: it is the whole chunk. ``base``: what
    must be fetched besides, if the chunk is a difference to one of another version: that one alone."""

    chunk: Chunk
    source: tuple[slice, ...] = ()
    target: Any = None
    direct: bool = False
    base: Run | None = None


class Place(NamedTuple):
    """Stored bytes in a run, and the pieces whose chunks are made of them: a tensor's, and those of what is derived from it.
    ``size``: how many these are. They are decoded to ``decoded`` bytes of ``words``."""

    pieces: list[Piece]
    size: int
    words: DType
    decoded: int

    @property
    def chunk(self) -> Chunk:
        """The first piece's."""
        return self.pieces[0].chunk

    @property
    def base(self) -> Run | None:
        """What they are a difference to, if they are."""
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
        """Bytes of memory that reading, decoding and checking it takes: what is stored, one chunk, its planes, what is derived
        from it, and what it is a difference to."""
        return self.length + max(map(_cost, self.pieces))

    @property
    def bases(self) -> Iterator[Run]:
        """All that must be fetched besides, of other versions."""
        if all(piece.base is None for piece in self.pieces):
            return  # as mostly
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
        """Where the stored bytes of each piece are; together where they are the same."""
        places = list[Place]()
        for piece in self.pieces:
            chunk = piece.chunk
            if places and places[-1].holds(chunk):
                places[-1].pieces.append(piece)
            else:
                places.append(Place([piece], chunk.coding.size, chunk.words, chunk.decoded))
        return places

    def stored(self, piece: Piece, data: Any) -> Any:
        """The bytes of one piece's chunk in what was fetched."""
        begin = piece.chunk.start - self.start
        return data[begin : begin + piece.chunk.coding.size]

    @contextlib.contextmanager
    def naming(self, piece: Piece) -> Iterator[None]:
        """Let errors name the pack and the tensor."""
        try:
            yield
        except (Damaged, Unsupported) as error:
            chunk = piece.chunk
            what = f"tensor {chunk.name!r}, bytes {chunk.start} + {chunk.coding.size}: {error.what}"
            raise type(error)(what, subject=self.key, remedy=error.remedy) from error

    @contextlib.contextmanager
    def needing(self, piece: Piece) -> Iterator[None]:
        """Let errors of what a piece is a difference to say who needs it."""
        try:
            yield
        except (Damaged, Unsupported) as error:
            what = f"{error.what}; {piece.chunk.name!r} of version {self.version} is a difference to it"
            raise type(error)(what, subject=error.subject, remedy=error.remedy) from error


class Reader:
    """Reads from the packs of one version. ``base``: what must be fetched of another one for a chunk that is a difference.
    ``threads``: requests and decodings at a time. ``turn``: what part of the runs, from 0 to 1, comes last instead of first:
    ranks that want the same and share it begin with different parts of it."""

    def __init__(
        self,
        store: ObjectStore,
        version: int,
        attempt: str,
        *,
        base: Callable[[Chunk], Run],
        threads: int | None = None,
        turn: float = 0.0,
    ) -> None:
        self._store, self._version, self._attempt, self._base, self._turn = store, version, attempt, base, turn
        self.threads = threads or min(16, 2 * (os.cpu_count() or 1))

    def fill(self, requests: Iterable[Request], progress: Callable[[int], None] = lambda nbytes: None) -> None:
        """Fill every request's target; see ``complete``."""
        self.complete(self.runs(requests), progress)

    def complete(self, runs: Sequence[Run], progress: Callable[[int], None] = lambda nbytes: None) -> None:
        """Fill the targets of runs that ``runs`` gave; ``progress`` is told the decoded bytes of each finished chunk.

        Raises ``Damaged`` naming the pack and the tensor, or the store's error; what the targets hold is undefined then.
        Memory beyond the targets: for each thread 16 MiB of stored bytes and one chunk.
        """
        for _ in self._decode(runs, progress, self.threads):
            pass

    def check(self, runs: Sequence[Run], progress: Callable[[int], None], *, memory: int) -> Iterator[Run]:
        """Read and decode runs, hold each chunk against its digests, keep nothing; yields each run, in order, once it is whole.

        ``progress`` as for ``fill``. As many threads read as find room in ``memory`` bytes, but one in any case.
        """
        room = memory // max((run.cost for run in runs), default=1)
        return self._decode(runs, progress, max(1, min(self.threads, room)))

    def whole(self, wanted: Iterable[Chunk]) -> list[Run]:
        """What must be fetched to read chunks whole."""
        return self._runs([Piece(chunk, base=self._based(chunk)) for chunk in wanted])

    def runs(self, requests: Iterable[Request]) -> list[Run]:
        """What must be fetched to fill the requests; ``Damaged`` unless the manifest's chunks tile each of them."""
        return self._runs([piece for request in requests for piece in self._pieces(request)])

    def fetch(self, run: Run, into: memoryview | None = None) -> Buffer:
        """A run's bytes, in new memory or ``into`` the caller's: each chunk held against the digest of its stored bytes.

        Fetched a second time if they are wrong: they may have been changed on their way.
        """
        try:
            return self._fetch(run, into)
        except Damaged:
            return self._fetch(run, into)

    def elements(
        self, run: Run, into: Callable[[Piece], Bytes | None] = lambda piece: None, *, proven: bool = True
    ) -> Iterator[tuple[Piece, Bytes]]:
        """A run's pieces, each with the bytes of all its chunk's elements, fetched and checked. ``into``: memory that they may be
        decoded into, if they are what is stored. ``proven``: see ``decode``."""
        data = np.frombuffer(self.fetch(run), np.uint8)
        for place in run.places:
            words: Bytes | None = None
            for piece in place.pieces:
                base = self._needed(run, piece) if words is None else None
                with run.naming(piece):
                    stored = run.stored(piece, data)
                    words, raw = decode(piece.chunk, stored, words, into=into(piece), base=base, proven=proven)
                yield piece, raw

    def bring(self, run: Run, into: memoryview | None) -> Buffer:
        """``fetch`` without looking at the bytes: for who holds them against their digests before they are believed."""
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

    def _runs(self, pieces: list[Piece]) -> list[Run]:
        packs: dict[tuple[int, str, int], list[Piece]] = defaultdict(list)
        for piece in pieces:
            packs[piece.chunk.node, piece.chunk.group, piece.chunk.pack].append(piece)
        runs = [
            run
            for (node, group, pack), of in sorted(packs.items())
            for run in _coalesced(keys.pack(self._version, self._attempt, node, group, pack), of)
        ]
        first = int(len(runs) * self._turn)
        return runs[first:] + runs[:first]

    def _pieces(self, request: Request) -> list[Piece]:
        """The overlaps of the request's box with the tensor's chunks; ``Damaged`` unless they tile it."""
        pieces, parts = [], []
        for chunk in request.chunks:
            part = overlap(request.box, box := chunk.box)
            if part is not None:
                target = request.target if part == request.box else request.target[within(part, request.box) + (...,)]
                source = () if part == box else within(part, box)
                pieces.append(Piece(chunk, source, target, part == box, self._based(chunk)))
                parts.append(part)
        if not tile(parts, request.box):
            what = f"the manifest's chunks do not hold each element of the box {request.box} exactly once"
            raise Damaged(what, subject=request.name)
        return pieces

    def _based(self, chunk: Chunk) -> Run | None:
        return None if chunk.coding.base is None else self._base(chunk)

    def _decode(self, runs: Sequence[Run], progress: Callable[[int], None], threads: int) -> Iterator[Run]:
        if not runs:
            return
        with ThreadPoolExecutor(min(threads, len(runs)), "raystow-read") as pool:
            try:
                yield from pool.map(lambda run: self._decode_one(run, progress), runs)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _decode_one(self, run: Run, progress: Callable[[int], None]) -> Run:
        for piece, raw in self.elements(run, _own_memory):
            chunk, target = piece.chunk, piece.target
            if target is not None and not np.may_share_memory(raw, target):
                target[...] = raw.view(target.dtype).reshape(chunk.extent)[piece.source]
            progress(chunk.nbytes)
        return run

    def _needed(self, run: Run, piece: Piece) -> Bytes | None:
        """What a piece's words are differences to, if they are; errors name what is damaged, and say who needs it."""
        if piece.base is None:
            return None
        with run.needing(piece):
            ((_, raw),) = self.elements(piece.base, proven=False)
        return raw


def _coalesced(key: str, pieces: list[Piece]) -> Iterator[Run]:
    """The pieces of one pack in runs that are fetched by one request each. What they are differences to counts like their own
    bytes: a run is one thread's work, and at the end of a chain most of it lies beneath."""
    run, begin, end, beneath = list[Piece](), 0, 0, 0
    chunks = ((piece.chunk, piece) for piece in pieces)
    places = (((chunk.start, chunk.coding.size, chunk.derivation is not None), piece) for chunk, piece in chunks)
    for (start, size, _), piece in sorted(places, key=operator.itemgetter(0)):
        again = bool(run) and start == run[-1].chunk.start  # the same bytes: of what is derived from another piece
        more = 0 if again or piece.base is None else piece.base.nbytes
        if run and not again and (start > end + _GAP or start + size - begin + beneath + more > _RUN):
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
    """The words that a chunk's stored bytes decode to, and its elements' bytes, held against their digest. ``words``: what comes
    of them, if that is known. ``into``: memory that the elements may be decoded into, if they are these words. ``base``: the
    bytes that these words are differences to. Unless ``proven``, nothing is held against that digest: of what others are made of,
    whose own digests prove it."""
    if words is None:
        words = into if into is not None and chunk.words.name == chunk.dtype else np.empty(chunk.decoded, np.uint8)
        chunks.decode(chunk.coding, chunk.words, stored, words, base)
    raw = derive(words, chunk.words.name, chunk.dtype)
    if proven and raw_digest(raw) != chunk.raw_digest:
        raise Damaged("the decoded bytes do not match their digest")
    return words, raw


def _own_memory(piece: Piece) -> Bytes | None:
    """Where a piece's elements belong, if all of the chunk's belong there, one behind the other."""
    target = piece.target
    return target.reshape(-1).view(np.uint8) if piece.direct and target.flags.c_contiguous else None
