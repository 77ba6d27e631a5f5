"""What a decoder does with the stored bytes that come up together, worked out before they are there: tables of addresses."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ....storage.coding import chunk as chunks
from ....storage.coding.digest import finish
from ....storage.errors import Damaged, Unsupported
from ....storage.reader import Piece, Place, Run
from .. import kernel_args
from ..nvcomp import ALIGN
from ..stream_layout import Streams, aligned, spread


class LaneMemory(NamedTuple):
    """Of a lane: where each part of it begins, or how much of it something takes, in bytes. ``stored``: what is fetched.
    ``planes``: that are decoded. ``aligned``: coded streams, each at an address that nvCOMP takes. ``words``: those that do not
    go straight to their place."""

    stored: int = 0
    planes: int = 0
    aligned: int = 0
    words: int = 0

    def __add__(self, other: Any) -> LaneMemory:
        return LaneMemory(*map(operator.add, self, other))

    def within(self, room: LaneMemory) -> bool:
        """Whether there is room for it."""
        return all(map(operator.le, self, room))


NONE = LaneMemory()
ROOM = LaneMemory(stored=72 << 20, planes=64 << 20, aligned=36 << 20, words=96 << 20)
"""What a lane has, ``stored`` on the device and as much pinned on the host: fewer lanes take less launching."""


class Fetch(NamedTuple):
    """A run that is fetched to ``start`` of a lane's memory. ``users``: of a base, what is a difference to it, the nearest
    first."""

    run: Run
    start: int
    users: tuple[tuple[Run, Piece], ...] = ()

    @contextlib.contextmanager
    def needed(self) -> Iterator[None]:
        """Let errors say who needs it."""
        with contextlib.ExitStack() as stack:
            for run, piece in reversed(self.users):
                stack.enter_context(run.needing(piece))
            yield

    @contextlib.contextmanager
    def naming(self, piece: Piece) -> Iterator[None]:
        """Let errors name a piece as well."""
        with self.needed(), self.run.naming(piece):
            yield


class Making(NamedTuple):
    """How words are made: all of a lane that are made alike are made by one launch. ``rounded``: to this dtype, of float32 words
    that are made before; otherwise of ``width`` planes. ``added``: of differences, to words that are made before; how many
    versions these are made of."""

    width: int
    rotated: bool = False
    added: int = 0
    rounded: str = ""


@dataclass
class DecodeBatch:
    """Words that are made alike. ``rows``: see ``tables.COLUMNS``. ``of``: what each row's digest is to be held against, if that
    is to be done."""

    rows: list[list[int]] = field(default_factory=list)
    of: list[tuple[Fetch, Piece] | None] = field(default_factory=list)

    def add(self, row: list[int], of: tuple[Fetch, Piece] | None) -> None:
        """One more."""
        self.rows.append(row)
        self.of.append(of)

    def table(self) -> np.ndarray[Any, Any]:
        """The rows, int64 [rows, COLUMNS]."""
        return np.array([row + [0] * (kernel_args.COLUMNS - len(row)) for row in self.rows], np.int64)


@dataclass
class LanePlan:
    """What a lane decodes: tables of addresses, in the units of ``kernels``. ``fetches``: each run, then the bases of its
    pieces. The rest is there when it is laid out."""

    fetches: list[Fetch] = field(default_factory=list)
    needs: LaneMemory = NONE
    stored: list[tuple[int, Place]] = field(default_factory=list)  # where in device memory they begin
    unpacks: list[tuple[int, int, int]] = field(default_factory=list)
    streams: dict[tuple[str, int], Streams] = field(default_factory=dict)  # by codec and length
    made: dict[Making, DecodeBatch] = field(default_factory=lambda: defaultdict(DecodeBatch))
    copies: list[tuple[Piece, int]] = field(default_factory=list)  # what does not go straight to its place, and where it is made

    def add(self, run: Run, needs: LaneMemory) -> None:
        """One run more, and its bases."""
        end = self.needs.stored
        for one, users in _with_bases(run):
            self.fetches.append(Fetch(one, end, users))
            end += aligned(one.length)
        self.needs += needs

    def lay_out(self, memory: LaneMemory) -> None:
        """Note for each plane of a chunk where it lies, or will lie when it is decoded, and what is made of them; ``streams`` are
        then to be worked out. ``Damaged`` or ``Unsupported`` naming the first chunk whose description makes no sense."""
        free = [*memory]  # from here on
        fetches = iter(self.fetches)
        for fetch in fetches:
            for place in fetch.run.places:
                chain = [(fetch, place)]
                while (base := chain[-1][1].base) is not None:
                    chain.append((next(fetches), base.places[0]))
                if place.decoded:
                    self._make(chain, memory.stored, free)

    def _make(self, chain: list[tuple[Fetch, Place]], stored: int, free: list[int]) -> None:
        """Pieces of the same stored bytes, whose elements are the words, or are derived from them: of what they are differences
        to, if they are, and of the differences, one after the other in the same place."""
        planes = [self._planes(*part, stored, free) for part in chain]
        fetch, place = chain[0]
        own, words = place.words.name, 0
        for piece in place.pieces:
            if piece.chunk.dtype == own:
                words = self._target(piece, free)
                self._join(chain, planes, words, piece)
        if not words:
            words = _take(free, place.decoded)
            self._join(chain, planes, words, None)
        for piece in place.pieces:
            if piece.chunk.dtype != own:
                row = [self._target(piece, free), piece.chunk.nbytes // 2, words]
                self.made[Making(2, rounded=piece.chunk.dtype)].add(row, (fetch, piece))

    def _planes(self, fetch: Fetch, place: Place, stored: int, free: list[int]) -> list[int]:
        """The bytes of a plane of a chunk, and where each is when it is decoded."""
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
                target = free[_PLANES]
                free[_PLANES] += aligned(n)
            planes[1 + plane.number] = target
            if plane.codec == chunks.PACK7:
                self.unpacks.append((source, target, n // 8))
            elif plane.codec != chunks.RAW:
                kind = plane.codec, coding.stream
                streams = self.streams.get(kind) or self.streams.setdefault(kind, Streams(coding.stream))
                free[_ALIGNED] += streams.add(plane, source, free[_ALIGNED], target, n)
        return planes

    def _join(self, chain: list[tuple[Fetch, Place]], planes: list[list[int]], words: int, wanted: Piece | None) -> None:
        """Make words at an address; ``wanted``: the piece whose elements they are."""
        for added, ((fetch, place), of) in enumerate(zip(reversed(chain), reversed(planes), strict=True)):
            piece = place.pieces[0] if fetch.users else wanted
            making = Making(len(of) - 1, place.chunk.coding.rotated, added)
            self.made[making].add([words, *of], None if piece is None else (fetch, piece))

    def _target(self, piece: Piece, free: list[int]) -> int:
        """Where the elements of a piece's chunk go: where they belong, or to memory from which a part is copied there."""
        if _direct(piece):
            return int(piece.target.data_ptr())
        self.copies.append((piece, free[_WORDS]))
        return _take(free, piece.chunk.nbytes)

    def as_written(self, digests: np.ndarray[Any, Any]) -> bool:
        """Whether all stored bytes have the digests that the manifest says. ``digests``: 32 bytes of each in ``stored``."""
        found = digests.view("V32")
        return all(
            piece.chunk.stored_digest == digest
            for (_, place), digest in zip(self.stored, found.tolist(), strict=True)
            for piece in place.pieces
        )

    @property
    def in_order(self) -> list[tuple[Making, DecodeBatch]]:
        """What is added, or rounded, comes after what it is made of."""
        return sorted(self.made.items(), key=lambda made: (made[0].rounded != "", made[0].added))

    def check(self, sums: np.ndarray[Any, Any]) -> Iterator[int]:
        """Hold the sum of ``raw_digest`` of each row of the batches, in order, against what the manifest says. The bytes of each
        piece that was asked for; ``Damaged`` naming the first that is wrong."""
        of = itertools.chain.from_iterable(batch.of for _, batch in self.in_order)
        known = [(i, *one) for i, one in enumerate(of) if one is not None]  # else there are digests of what follows from it
        nbytes = [piece.chunk.nbytes for _, _, piece in known]
        found = finish(sums.view(np.uint64)[[i for i, _, _ in known]], np.array(nbytes, np.uint64))
        right = found == np.array([piece.chunk.raw_digest for _, _, piece in known], np.uint64)
        for (_, fetch, piece), size, same in zip(known, nbytes, right.tolist(), strict=True):
            if not same:
                with fetch.naming(piece):
                    raise Damaged("the decoded bytes do not match their digest")
            if not fetch.users:
                yield size


_PLANES, _ALIGNED, _WORDS = map(LaneMemory._fields.index, ("planes", "aligned", "words"))


def plan(runs: Iterable[Run], others: list[Run]) -> Iterator[LanePlan]:
    """Runs in numbers that fit a lane, as they are asked for; and to ``others`` those that no lane can take."""
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


def parts(run: Run) -> Iterator[tuple[Run, LaneMemory | None]]:
    """A run as several, where it needs more than a lane has; each with what it needs, or None if that cannot be given to it."""
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
        yield from parts(Run(run.key, start, end - start, tuple(pieces)))


def _needs(run: Run) -> LaneMemory:
    """What a run takes of a lane, and its bases: each stream and each plane may begin where nvCOMP wants it."""
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


def _with_bases(run: Run, users: tuple[tuple[Run, Piece], ...] = ()) -> Iterator[tuple[Run, tuple[tuple[Run, Piece], ...]]]:
    """A run, and all that its pieces are differences to, each with its users."""
    yield run, users
    for place in run.places:
        if (base := place.base) is not None:
            yield from _with_bases(base, ((run, place.pieces[0]), *users))


def _decodable(piece: Piece) -> bool:
    """Whether nvCOMP takes its streams, and the kernels its differences: of words that were taken apart, to elements that are
    stored as they are."""
    chunk, base = piece.chunk, piece.base
    coding = chunk.coding
    if coding.streams and coding.stream % ALIGN:
        return False
    if base is None:
        return True
    below = base.pieces[0]
    return len(coding.codecs) == chunk.words.width and below.chunk.dtype == below.chunk.words.name and _decodable(below)


def _direct(piece: Piece) -> bool:
    """Whether the elements of a piece's chunk lie one behind the other where they belong."""
    return piece.direct and bool(piece.target.is_contiguous())


def _take(free: list[int], nbytes: int) -> int:
    """Memory for words."""
    start = free[_WORDS]
    free[_WORDS] += aligned(nbytes)
    return start
