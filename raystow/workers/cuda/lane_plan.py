"""What a decoder does with the stored bytes that come up together, worked out before they are there: tables of addresses."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ...storage.coding import chunk as chunks
from ...storage.reader import Piece, Run
from .nvcomp import ALIGN

STORED = 72 << 20  # bytes of a lane's pinned memory, and of as much on the device: fewer lanes take less launching
ALIGNED = 36 << 20  # bytes on the device for coded streams, each at an address that nvCOMP takes
PLANES = 64 << 20  # bytes of decoded planes on the device


class Making(NamedTuple):
    """How words are made: all of a lane that are made alike are made by one launch. ``rounded``: to this dtype, of float32 words
    that are made before; otherwise of ``width`` planes."""

    width: int
    rotated: bool = False
    rounded: str = ""


@dataclass
class Batch:
    """Words that are made alike. ``rows``: see ``tables.COLUMNS``. ``of``: what each row's digest is to be held against, if that
    is to be done."""

    rows: list[list[int]] = field(default_factory=list)
    of: list[tuple[Run, Piece] | None] = field(default_factory=list)

    def add(self, row: list[int], of: tuple[Run, Piece] | None) -> None:
        """One more."""
        self.rows.append(row)
        self.of.append(of)


@dataclass
class Streams:
    """Coded streams of one kind, by plane: where the first lies, where it is decoded to, how many there are, and the bytes of the
    plane. ``sizes``: of all of them."""

    length: int  # that each but a plane's last decodes to
    planes: list[tuple[int, int, int, int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    @functools.cached_property
    def rooms(self) -> np.ndarray[Any, Any]:
        """What each decodes to."""
        _, _, counts, sizes = np.array(self.planes, np.int64).T
        before = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rooms: np.ndarray[Any, Any] = np.minimum(self.length, np.repeat(sizes, counts) - before * self.length)
        return rooms

    def table(self, aligned: int) -> np.ndarray[Any, Any]:
        """int64 [5, streams]: where each lies, where it goes from the address ``aligned`` on, its size, where it is decoded to,
        and its room there."""
        sources, targets, counts, _ = np.array(self.planes, np.int64).T
        first = np.cumsum(counts) - counts
        sizes = np.array(self.sizes, np.int64)
        room = -(-sizes // ALIGN) * ALIGN
        before = np.cumsum(sizes) - sizes
        sources = np.repeat(sources - before[first], counts) + before
        targets = np.repeat(targets - first * self.length, counts) + np.arange(len(sizes)) * self.length
        return np.stack((sources, aligned + np.cumsum(room) - room, sizes, targets, self.rooms))


@dataclass
class LanePlan:
    """What a lane decodes: tables of addresses, in the units of ``kernels``."""

    runs: list[Run]
    starts: list[int]  # where each run lies in the lane's memory
    copies: list[tuple[Piece, torch.Tensor]] = field(default_factory=list)  # what does not go straight to its place
    unpacks: list[tuple[int, int, int]] = field(default_factory=list)
    streams: dict[tuple[str, int], Streams] = field(default_factory=dict)  # by codec and length
    made: dict[Making, Batch] = field(default_factory=lambda: defaultdict(Batch))
    stored: list[tuple[int, list[Piece]]] = field(default_factory=list)  # where in device memory, and what is of these bytes
    held: list[torch.Tensor] = field(default_factory=list)  # for words that do not go straight to their place
    planes: int = 0  # bytes taken of the lane's memory of that name

    @property
    def in_order(self) -> list[tuple[Making, Batch]]:
        """What is rounded comes after what it is made of."""
        return sorted(self.made.items(), key=lambda made: made[0].rounded != "")

    @property
    def results(self) -> int:
        """How many numbers come of it: two for each stream, one for each row."""
        streams = sum(len(streams.sizes) for streams in self.streams.values())
        return 2 * streams + sum(len(batch.rows) for batch in self.made.values())


def parts(run: Run) -> Iterator[Run]:
    """A run as several, where it decodes to more than a lane can take."""
    if fits(run) or len(run.places) < 2:
        yield run
        return
    middle = len(run.places) // 2
    for half in (run.places[:middle], run.places[middle:]):
        pieces = [piece for same in half for piece in same]
        start, end = pieces[0].chunk.start, max(piece.chunk.start + piece.chunk.coding.size for piece in pieces)
        yield from parts(Run(run.key, start, end - start, tuple(pieces)))


def batches(runs: list[Run]) -> Iterator[LanePlan]:
    """Runs in numbers that fit a lane."""
    some, starts, stored, planes, aligned = list[Run](), list[int](), 0, 0, 0
    for run in runs:
        length, raw, spread = -(-run.length // ALIGN) * ALIGN, _raw(run), _aligned(run)
        if some and (stored + length > STORED or planes + raw > PLANES or aligned + spread > ALIGNED):
            yield LanePlan(some, starts)
            some, starts, stored, planes, aligned = [], [], 0, 0, 0
        some.append(run)
        starts.append(stored)
        stored += length
        planes += raw
        aligned += spread
    if some:
        yield LanePlan(some, starts)


def _raw(run: Run) -> int:
    """Bytes that the decoded planes of a run take, each rounded up."""
    total = 0
    for same in run.places:
        coding, decoded = same[0].chunk.coding, same[0].chunk.decoded
        coded = sum(codec != chunks.RAW for codec in coding.codecs)
        total += coded * (-(-decoded // max(1, len(coding.codecs))) + ALIGN)
    return total


def _aligned(run: Run) -> int:
    """Bytes that a run's streams may take at most, each beginning where nvCOMP wants it."""
    total = 0
    for same in run.places:
        coding = same[0].chunk.coding
        streamed = sum(size for codec, size in zip(coding.codecs, coding.stored, strict=False) if codec in chunks.STREAMED)
        total += streamed + ALIGN * len(coding.streams)
    return total


def fits(run: Run) -> bool:
    """Whether a lane can take a run, and nvCOMP its streams."""
    return (
        run.length <= STORED
        and _raw(run) <= PLANES
        and _aligned(run) <= ALIGNED
        and all(not piece.chunk.coding.streams or piece.chunk.coding.stream % ALIGN == 0 for piece in run.pieces)
    )
