"""What chunks of an earlier version become in device memory, worked out before they are there: tables of addresses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....storage.coding.chunk import PACK7, RAW, STREAMED, layout
from ....storage.coding.digest import stored_digest
from ....storage.coding.kernels import Bytes
from ....storage.errors import Damaged
from ....storage.format.manifest import Chunk
from .. import tables
from ..nvcomp import ALIGN
from ..streams import Streams, aligned, spread, work_out


@dataclass(eq=False)
class Former:
    """A chunk of an earlier version, and its bytes, in ``parts``. ``sound``: a decoder may see them."""

    chunk: Chunk
    parts: Sequence[Bytes]
    sound: bool = False

    def __post_init__(self) -> None:
        if not any(codec in STREAMED for codec in self.chunk.coding.codecs):
            self.sound = True  # none will: whatever they are, nothing is wrong but the words, whose digest is looked at

    def check(self, copy: Bytes) -> None:
        """``Damaged`` if the bytes, of which this is a copy, are not what was stored: looked at once, before something decodes
        them."""
        if not self.sound and stored_digest(copy) != self.chunk.stored_digest:
            raise Damaged("the stored bytes do not match their digest", subject=self.chunk.name)
        self.sound = True


def serves(chunk: Chunk) -> bool:
    """Whether a chunk can be brought up: it is no difference itself, and lies in planes as a GPU codes them."""
    coding, dtype = chunk.coding, chunk.words
    split = (coding.planes, coding.rotated) == ((True, dtype.rotate) if dtype.width > 1 else (False, False))
    fits = not any(codec in STREAMED for codec in coding.codecs) or coding.stream % ALIGN == 0
    return chunk.derivation is None and coding.base is None and split and fits


def room(chunk: Chunk) -> int:
    """Bytes that it takes in a lane of device memory."""
    coding = chunk.coding
    planes = sum(codec != RAW for codec in coding.codecs) * aligned(chunk.decoded // len(coding.codecs))
    streamed = [size for codec, size in zip(coding.codecs, coding.stored, strict=True) if codec in STREAMED]
    return aligned(coding.size) + planes + spread(sum(streamed), len(coding.sizes) + len(streamed))


@dataclass
class Load:
    """What comes up together: where each chunk's bytes go, and how many there are in all. Tables, at first in host memory: of
    ``moving.move``, ``moving.unpack7``, of each kind of coded streams what ``Codec.decompress`` takes, and ``planes``, what
    ``kernels.split`` takes as ``bases``."""

    formers: list[tuple[Former, int]]
    nbytes: int
    moves: Any
    unpacks: Any
    streams: dict[tuple[str, int], Any]
    planes: Any
    longest: int
    largest: int


def pieces(places: Sequence[tuple[Former, int]], address: int) -> Any:
    """What ``copying.copy`` takes to bring chunks to ``places`` behind an address."""
    found = list[tuple[int, int, int]]()
    for former, start in places:
        for part in former.parts:
            found.append((part.ctypes.data, address + start, part.size))
            start += part.size
    return np.array(found, np.int64).reshape(-1, 3)


def evenly(rows: Any, parts: int) -> Iterator[Any]:
    """Such pieces, divided into so many parts of as many bytes, one more or less; as many as are not empty."""
    ends, sizes = np.cumsum(rows[:, 2]), rows[:, 2]
    bounds = np.linspace(0, sizes.sum(), parts + 1).astype(np.int64)
    for begin, end in itertools.pairwise(bounds):
        first, last = np.maximum(ends - sizes, begin), np.minimum(ends, end)
        skipped, some = first - (ends - sizes), last > first
        if some.any():
            yield np.stack([rows[:, 0] + skipped, rows[:, 1] + skipped, last - first], axis=1)[some]


def load(formers: Sequence[Former], address: int) -> Load:
    """Work out what is done in a lane that begins at ``address``: first come the stored bytes, then decoded planes, and coded
    streams where nvCOMP wants them. ``Damaged`` if a chunk's description makes no sense."""
    places, end = list[tuple[Former, int]](), 0
    for former in formers:
        places.append((former, end))
        end += aligned(former.chunk.coding.size)
    nbytes, unpacks, streams = end, list[tuple[int, int, int]](), dict[tuple[str, int], Streams]()
    planes = np.zeros((len(formers), tables.COLUMNS), np.int64)
    for row, (former, start) in zip(planes, places, strict=True):
        chunk, coding = former.chunk, former.chunk.coding
        found = layout(coding, chunk.words, chunk.decoded, chunk.coding.size)
        n = chunk.decoded // len(found)
        row[1] = n
        for plane in found:
            source = address + start + plane.start
            row[2 + plane.number] = target = source if plane.codec == RAW else address + end
            if plane.codec == RAW:
                continue
            end += aligned(n)
            if plane.codec == PACK7:
                unpacks.append((source, target, n // 8))
            else:
                of = streams.setdefault((plane.codec, coding.stream), Streams(coding.stream))
                end += of.add(plane, source, address + end, target, n)
    work_out(streams.values())
    moves = np.concatenate([np.empty((0, 3), np.int64), *(some.table[:3].T for some in streams.values())])
    decodes = {key: some.table[1:] for key, some in streams.items()}
    largest = max((groups for *_, groups in unpacks), default=0)
    longest = int(moves[:, 2].max(initial=0))
    return Load(places, nbytes, moves, np.array(unpacks, np.int64).reshape(-1, 3), decodes, planes, longest, largest)
