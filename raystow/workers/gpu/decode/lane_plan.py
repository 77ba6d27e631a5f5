"""The plan of a lane: tables of addresses for decoding some runs of stored bytes, computed before the bytes are fetched."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ....storage.coding import chunk as chunks
from ....storage.coding.digest import finish
from ....storage.errors import Damaged, Unsupported
from ....storage.versions.runs import ByteRun, Piece, Place
from .. import kernel_args
from ..nvcomp import ALIGN, STREAM
from ..stream_layout import Streams, aligned, spread


@dataclass
class LaneMemory:
    """The parts of a lane's memory: an address in each, or a number of bytes."""

    stored: int = 0  # stored bytes
    planes: int = 0  # decoded planes
    aligned: int = 0  # coded streams, at addresses that nvCOMP requires
    words: int = 0  # words that are not decoded directly to their target

    def __add__(self, other: LaneMemory) -> LaneMemory:
        stored, planes = self.stored + other.stored, self.planes + other.planes
        return LaneMemory(stored, planes, self.aligned + other.aligned, self.words + other.words)

    def within(self, most: LaneMemory) -> bool:
        """Return whether no part exceeds ``most``."""
        fits = self.stored <= most.stored and self.planes <= most.planes
        return fits and self.aligned <= most.aligned and self.words <= most.words

    def take_words(self, nbytes: int) -> int:
        """Return the address of memory for words, and advance it."""
        start = self.words
        self.words += aligned(nbytes)
        return start


ROOM = LaneMemory(stored=72 << 20, planes=64 << 20, aligned=36 << 20, words=96 << 20)
"""The memory of a lane on the device; ``stored`` is also allocated on the host. Few large lanes need fewer launches."""

_CODECS = frozenset({chunks.RAW, chunks.PACK7, *STREAM})  # others are decoded on the host


class Fetch(NamedTuple):
    """A run that is fetched to ``start`` of a lane's memory. ``users``: the deltas to a base, the nearest first."""

    run: ByteRun
    start: int
    users: tuple[tuple[ByteRun, Piece], ...] = ()

    @contextlib.contextmanager
    def needed(self) -> Iterator[None]:
        """Name the users in errors."""
        with contextlib.ExitStack() as stack:
            for run, piece in reversed(self.users):
                stack.enter_context(run.needing(piece))
            yield

    @contextlib.contextmanager
    def naming(self, piece: Piece) -> Iterator[None]:
        """Name the users and a piece in errors."""
        with self.needed(), self.run.naming(piece):
            yield


class Assembly(NamedTuple):
    """How words are computed; all words of a lane that are computed in the same way are computed by one launch."""

    width: int  # planes
    rotated: bool = False
    added: int = 0  # the planes are a delta that is added to words computed before; how many versions these depend on
    rounded: str = ""  # float32 words that were computed before are rounded to this dtype


@dataclass
class DecodeBatch:
    """Words that are computed by one launch."""

    rows: list[list[int]] = field(default_factory=list)  # see kernel_args.COLUMNS
    of: list[tuple[Fetch, Piece] | None] = field(default_factory=list)  # whose digest is compared with that of each row

    def add(self, row: list[int], of: tuple[Fetch, Piece] | None) -> None:
        """Add a row."""
        self.rows.append(row)
        self.of.append(of)

    def table(self) -> npt.NDArray[np.int64]:
        """Return the rows as int64 [rows, COLUMNS]."""
        return np.array([row + [0] * (kernel_args.COLUMNS - len(row)) for row in self.rows], np.int64)


@dataclass
class LanePlan:
    """What a lane decodes. ``add`` runs first; ``lay_out`` then fills in all fields but ``fetches`` and ``needs``."""

    fetches: list[Fetch] = field(default_factory=list)  # each run, then the bases of its pieces
    needs: LaneMemory = field(default_factory=LaneMemory)
    stored: list[tuple[int, Place]] = field(default_factory=list)  # the address of each place's stored bytes
    unpacks: list[tuple[int, int, int]] = field(default_factory=list)  # the table of copy_kernels.unpack7
    streams: dict[tuple[str, int], Streams] = field(default_factory=dict)  # by codec and length
    made: dict[Assembly, DecodeBatch] = field(default_factory=lambda: defaultdict(DecodeBatch))
    copies: list[tuple[Piece, int]] = field(default_factory=list)  # pieces not decoded to their target, and their address

    def add(self, run: ByteRun, needs: LaneMemory) -> None:
        """Add a run and its bases."""
        end = self.needs.stored
        for one, users in _with_bases(run):
            self.fetches.append(Fetch(one, end, users))
            end += aligned(one.length)
        self.needs += needs

    def lay_out(self, memory: LaneMemory) -> None:
        """Assign addresses in a lane's memory to all planes and words. ``compute_tables`` of ``streams`` must follow.

        Raises ``Damaged`` or ``Unsupported`` naming the first chunk whose description is invalid.
        """
        free = replace(memory)
        fetches = iter(self.fetches)
        for fetch in fetches:
            for place in fetch.run.places:
                chain = [(fetch, place)]
                while (base := chain[-1][1].base) is not None:
                    chain.append((next(fetches), base.places[0]))
                if place.decoded:
                    self._make(chain, memory.stored, free)

    def _make(self, chain: list[tuple[Fetch, Place]], stored: int, free: LaneMemory) -> None:
        """Add what computes the words of a place, and the pieces that are these words or are derived from them.

        ``chain``: the place, then its bases. The words of the last base are computed first, and the deltas added in place.
        """
        planes = [self._planes(*part, stored, free) for part in chain]
        fetch, place = chain[0]
        own, words = place.words.name, 0
        for piece in place.pieces:
            if piece.chunk.dtype == own:
                words = self._target(piece, free)
                self._join(chain, planes, words, piece)
        if not words:
            words = free.take_words(place.decoded)
            self._join(chain, planes, words, None)
        for piece in place.pieces:
            if piece.chunk.dtype != own:
                row = [self._target(piece, free), piece.chunk.nbytes // 2, words]
                self.made[Assembly(2, rounded=piece.chunk.dtype)].add(row, (fetch, piece))

    def _planes(self, fetch: Fetch, place: Place, stored: int, free: LaneMemory) -> list[int]:
        """Return the bytes of a plane of a chunk, and the address of each decoded plane."""
        chunk, coding = place.chunk, place.chunk.coding
        stored += fetch.start + chunk.start - fetch.run.start
        try:
            found = chunks.layout(coding, place.words, place.decoded, place.size)
        except (Damaged, Unsupported):
            with fetch.naming(place.pieces[0]):
                raise
        self.stored.append((stored, place))
        n = place.decoded // len(found)
        planes = [n] * (1 + len(found))
        for plane in found:
            source = target = stored + plane.start
            if plane.codec != chunks.RAW:
                target = free.planes
                free.planes += aligned(n)
            planes[1 + plane.number] = target
            if plane.codec == chunks.PACK7:
                self.unpacks.append((source, target, n // 8))
            elif plane.codec != chunks.RAW:
                kind = plane.codec, coding.stream
                streams = self.streams.get(kind) or self.streams.setdefault(kind, Streams(coding.stream))
                free.aligned += streams.add(plane, source, free.aligned, target, n)
        return planes

    def _join(self, chain: list[tuple[Fetch, Place]], planes: list[list[int]], words: int, own: Piece | None) -> None:
        """Add what computes the words of a chain at an address; ``own``: the piece whose elements they are."""
        for added, ((fetch, place), of) in enumerate(zip(reversed(chain), reversed(planes), strict=True)):
            piece = place.pieces[0] if fetch.users else own
            assembly = Assembly(len(of) - 1, place.chunk.coding.rotated, added)
            self.made[assembly].add([words, *of], None if piece is None else (fetch, piece))

    def _target(self, piece: Piece, free: LaneMemory) -> int:
        """Return where to decode a piece's chunk: its target, or lane memory from which the requested part is copied."""
        if _direct(piece):
            return int(piece.target.data_ptr())
        address = free.take_words(piece.chunk.nbytes)
        self.copies.append((piece, address))
        return address

    def as_written(self, digests: npt.NDArray[np.int64]) -> bool:
        """Return whether all stored bytes have the digests in the manifest. ``digests``: 32 bytes for each in ``stored``."""
        found = digests.view("V32")
        return all(
            piece.chunk.stored_digest == digest
            for (_, place), digest in zip(self.stored, found.tolist(), strict=True)
            for piece in place.pieces
        )

    @property
    def in_order(self) -> list[tuple[Assembly, DecodeBatch]]:
        """All batches: what is added or rounded comes after the words that it is computed from."""
        return sorted(self.made.items(), key=lambda made: (made[0].rounded != "", made[0].added))

    def check(self, sums: npt.NDArray[np.int64]) -> Iterator[int]:
        """Compare digests with the manifest, and yield the bytes of each requested piece.

        ``sums``: ``raw_digest``, before ``finish``, of each row of the batches, in order. Raises ``Damaged`` naming the first
        wrong piece.
        """
        for fetch, piece, right in self._compared(sums):
            if not right:
                with fetch.naming(piece):
                    raise Damaged("the decoded bytes do not match their digest")
            if not fetch.users:
                yield piece.chunk.nbytes

    def requested(self, sums: npt.NDArray[np.int64]) -> tuple[ByteRun, Piece]:
        """Return what was requested of the first wrong piece: that piece, or the one that is a delta to it. ``sums``: see
        ``check``, which raises for them."""
        fetch, piece = next((fetch, piece) for fetch, piece, right in self._compared(sums) if not right)
        return fetch.users[-1] if fetch.users else (fetch.run, piece)

    def _compared(self, sums: npt.NDArray[np.int64]) -> Iterator[tuple[Fetch, Piece, bool]]:
        """Yield each piece that has a digest, and whether it is right."""
        of = itertools.chain.from_iterable(batch.of for _, batch in self.in_order)
        known = [(i, *one) for i, one in enumerate(of) if one is not None]  # of others only what is derived from them is checked
        nbytes = [piece.chunk.nbytes for _, _, piece in known]
        found = finish(sums.view(np.uint64)[[i for i, _, _ in known]], np.array(nbytes, np.uint64))
        right = found == np.array([piece.chunk.raw_digest for _, _, piece in known], np.uint64)
        for (_, fetch, piece), same in zip(known, right.tolist(), strict=True):
            yield fetch, piece, same


def plan(runs: Iterable[ByteRun], others: list[ByteRun]) -> Iterator[LanePlan]:
    """Yield plans for runs, as many in each as fit into a lane. Runs that do not fit into any are appended to ``others``."""
    made = LanePlan()
    for run, needs in itertools.chain.from_iterable(map(parts, runs)):
        if needs is None:
            others.append(run)
            continue
        if made.fetches and not (made.needs + needs).within(ROOM):
            yield made
            made = LanePlan()
        made.add(run, needs)
    if made.fetches:
        yield made


def parts(run: ByteRun) -> Iterator[tuple[ByteRun, LaneMemory | None]]:
    """Split a run that does not fit into a lane. Yield each part with its needs, None if it cannot be decoded in a lane."""
    needs = _needs(run)
    if needs.within(ROOM) and all(_decodable(place.pieces[0]) for place in run.places):
        yield run, needs
        return
    if len(run.places) < 2:
        yield run, None
        return
    middle = len(run.places) // 2
    for half in (run.places[:middle], run.places[middle:]):
        pieces = [piece for place in half for piece in place.pieces]
        start, end = pieces[0].chunk.start, max(place.chunk.start + place.size for place in half)
        yield from parts(ByteRun(run.key, start, end - start, tuple(pieces)))


def _needs(run: ByteRun) -> LaneMemory:
    """Return the memory that a run and its bases need, with alignment of every stream and plane for nvCOMP."""
    stored = planes = streams = words = 0
    for one, users in _with_bases(run):
        stored += aligned(one.length)
        for place in one.places:
            coding, decoded = place.chunk.coding, place.decoded
            coded = [codec for codec in coding.codecs if codec != chunks.RAW]
            planes += len(coded) * (decoded // max(1, len(coding.codecs)) + 2 * ALIGN)
            if coding.streams:
                streamed = [size for codec, size in zip(coding.codecs, coding.stored, strict=False) if codec in chunks.STREAMED]
                streams += spread(sum(streamed), len(coding.sizes) + len(streamed))
            if not users:
                words += sum(aligned(piece.chunk.nbytes) for piece in place.pieces if not _direct(piece))
                words += 0 if any(piece.chunk.dtype == place.words.name for piece in place.pieces) else aligned(decoded)
    return LaneMemory(stored, planes, streams, words)


def _with_bases(
    run: ByteRun, users: tuple[tuple[ByteRun, Piece], ...] = ()
) -> Iterator[tuple[ByteRun, tuple[tuple[ByteRun, Piece], ...]]]:
    """Yield a run and all bases of its pieces, each with its users."""
    yield run, users
    for place in run.places:
        if (base := place.base) is not None:
            yield from _with_bases(base, ((run, place.pieces[0]), *users))


def _decodable(piece: Piece) -> bool:
    """Return whether the kernels can decode a piece: known codecs, aligned streams, and deltas of split words to words that are
    stored."""
    chunk, base = piece.chunk, piece.base
    coding = chunk.coding
    if not _CODECS.issuperset(coding.codecs) or (coding.streams and coding.stream % ALIGN):
        return False
    if base is None:
        return True
    below = base.pieces[0]
    return len(coding.codecs) == chunk.words.width and below.chunk.dtype == below.chunk.words.name and _decodable(below)


def _direct(piece: Piece) -> bool:
    """Return whether the target of a piece is its whole chunk, contiguous."""
    return piece.direct and bool(piece.target.is_contiguous())
