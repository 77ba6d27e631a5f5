"""Runs: byte ranges of a pack, and the targets that are decoded from them, every digest checked before bytes are used.

Who has the bytes, and what the ranges are read for, is the caller's: see ``PackReader``.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ..coding import chunk as chunks
from ..coding.derived import derive
from ..coding.digest import raw_digest, stored_digest
from ..coding.dtypes import DType
from ..coding.kernels import Bytes
from ..errors import Damaged, StateError, Unsupported
from ..format import keys
from ..format.manifest import Chunk
from ..object_store import Buffer

RUN = 16 << 20
"""Bytes; adjacent chunks are fetched together up to this."""

_GAP = 64 << 10  # bytes; a hole of this size costs less than another request

Target: TypeAlias = Any
"""A numpy array, or a torch tensor on a GPU."""
Stored = TypeVar("Stored", memoryview, Bytes)


class Piece(NamedTuple):
    """The part of a chunk that a request reads, if any, and its target. ``direct``: it is the whole chunk. ``base``: what else is
    fetched, if the chunk is a delta."""

    chunk: Chunk
    source: tuple[slice, ...] = ()
    target: Target = None
    direct: bool = False
    base: ByteRun | None = None


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
    def base(self) -> ByteRun | None:
        """What the stored bytes are a delta to, if they are one."""
        return self.pieces[0].base

    def holds(self, chunk: Chunk) -> bool:
        """Whether these are the stored bytes of another chunk of the pack."""
        first = self.chunk
        if chunk.start != first.start:
            return False
        return (chunk.coding, chunk.words, chunk.decoded) == (first.coding, self.words, self.decoded)


@dataclass(frozen=True)
class ByteRun:
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
    def bases(self) -> Iterator[ByteRun]:
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

    def fetch(self, read: ReadRun, into: memoryview | None = None) -> Buffer:
        """Its bytes, in new memory or ``into``, each chunk checked against the digest of its stored bytes. Wrong bytes are read a
        second time: they may have been changed in transit."""
        try:
            return self._fetch(read, into)
        except Damaged:
            return self._fetch(read, into)

    def elements(
        self,
        read: ReadRun,
        into: Callable[[Piece], Bytes | None] = lambda piece: None,
        *,
        memory: memoryview | None = None,
        proven: bool = True,
    ) -> Iterator[tuple[Piece, Bytes]]:
        """Its pieces, each with the bytes of its chunk's elements, read and checked. ``into``: memory to decode into, if the
        elements are what is stored; ``StateError`` if it was changed meanwhile. ``memory``: for the run's stored bytes.
        ``proven``: see ``decode``."""
        data = np.frombuffer(self.fetch(read, memory), np.uint8)
        for place in self.places:
            words: Bytes | None = None
            base, in_place = self._needed(read, place.pieces[0]), False
            for piece in place.pieces:
                with self.naming(piece):
                    stored, target = self.stored(piece, data), into(piece)
                    in_place = in_place or (words is None and target is not None)
                    try:
                        words, raw = decode(piece.chunk, stored, words, into=target, base=base, proven=proven)
                    except Damaged:
                        if not in_place:
                            raise
                        decode(piece.chunk, stored, base=base, proven=proven)  # in memory that nobody else can change
                        raise changed_target(piece) from None
                yield piece, raw

    def _fetch(self, read: ReadRun, into: memoryview | None) -> Buffer:
        data = read(self, into)
        for place in self.places:
            found = stored_digest(self.stored(place.pieces[0], memoryview(data)))
            for piece in place.pieces:
                with self.naming(piece):
                    if found != piece.chunk.stored_digest:
                        raise Damaged("the stored bytes do not match their digest")
        return data

    def _needed(self, read: ReadRun, piece: Piece) -> Bytes | None:
        """The words that a piece's words are deltas to, if they are."""
        if piece.base is None:
            return None
        with self.needing(piece):
            ((_, raw),) = piece.base.elements(read, proven=False)
        return raw


ReadRun = Callable[[ByteRun, "memoryview | None"], Buffer]
"""Returns the bytes of a run, in new memory or in the memory that it is given, without checks. Raises ``Damaged`` if there is no
such object."""


def coalesced(key: str, pieces: Sequence[Piece], most: int = RUN) -> Iterator[ByteRun]:
    """The pieces of one object in runs of one request each, of ``most`` bytes unless one chunk is larger.

    A run is one thread's work, so the bytes of bases count as well.
    """
    run, begin, end, beneath = list[Piece](), 0, 0, 0
    chunks = ((piece.chunk, piece) for piece in pieces)
    places = (((chunk.start, chunk.coding.size, chunk.derivation is not None), piece) for chunk, piece in chunks)
    for (start, size, _), piece in sorted(places, key=operator.itemgetter(0)):
        again = bool(run) and start == run[-1].chunk.start  # the same bytes: of what is derived from another piece
        more = 0 if again or piece.base is None else piece.base.nbytes
        if run and not again and (start > end + _GAP or start + size - begin + beneath + more > most):
            yield ByteRun(key, begin, end - begin, tuple(run))
            run = []
        if not run:
            begin, end, beneath = start, start, 0
        run.append(piece)
        beneath += more
        end = max(end, start + size)
    if run:
        yield ByteRun(key, begin, end - begin, tuple(run))


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
