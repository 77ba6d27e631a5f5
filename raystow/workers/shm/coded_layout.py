"""Locates chunks coded by a GPU in host memory. ``CodedLayout`` describes the chunks once, and each save announces only the
differences: fewer messages leave the interpreter lock to the training.

Chunks are read in batches, and planes of several batches are coded together: of most chunks the highest plane, of rounded chunks
others as well. The bytes arrive in runs: of a batch, the lowest planes of all its chunks and then the other raw planes; of a
group of coded planes, one plane after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...storage.coding import dtypes
from ...storage.coding.chunk import PACK7, RAW, Coding
from ...storage.coding.digest import finish
from ..protocol.messages import BatchBytes, ChunkInfo, CodedBatches, CodedLayout, RunSpan
from .ring import SlotPart

_NOTHING, _DIGEST = b"", 32


class CodedChunk(NamedTuple):
    """A chunk that has arrived. ``parts``: the bytes to store; ``stored_digest``: theirs, empty if no GPU has computed it."""

    info: ChunkInfo
    digest: int
    stored_digest: bytes
    coding: Coding
    parts: list[SlotPart]


class _Plane(NamedTuple):
    """A plane of a chunk: its place, codec, bytes, and the sizes of its streams (int32)."""

    parts: list[SlotPart]
    codec: str
    stored: int
    streams: bytes


def parts(spans: Sequence[RunSpan], start: int, nbytes: int) -> list[SlotPart]:
    """Return where ``nbytes`` bytes of a run are, from byte ``start``."""
    end = start + nbytes
    return [
        (slot, at + max(start - first, 0), min(end, first + size) - max(start, first))
        for first, slot, at, size in spans
        if max(start, first) < min(end, first + size)
    ]


class Layout:
    """Assembles chunks from the messages about their parts."""

    def __init__(self, layout: CodedLayout) -> None:
        self._layout = layout
        self._high = [_planes(mask) for mask in layout.planes]

    def chunks(self, arrived: CodedBatches) -> Iterator[CodedChunk]:
        """Yield every chunk in ``arrived``."""
        layout = self._layout
        tops = self._tops(arrived) if arrived.planes is not None else None
        stored = _digests(arrived)
        for batch in arrived.batches:
            first, last, low = layout.batches[batch.number]
            digests = np.frombuffer(batch.sums, "<i8").tolist()
            for i, digest in zip(range(first, last), digests, strict=True):
                if tops is None:
                    size = layout.nbytes[i]
                    coding, found = Coding(False, False, (RAW,), (size,), b"", 1), parts(batch.runs[0], layout.starts[i], size)
                else:
                    where = batch.lows[i - first] if batch.lows else (0, layout.starts[i], False)
                    coding, found = self._coded(i, batch, where, 0 if batch.lows else low, next(tops))
                yield CodedChunk(layout.chunks[i], finish(digest, layout.nbytes[i]), next(stored), coding, found)

    def _coded(
        self, i: int, batch: BatchBytes, where: tuple[int, int, bool], middle: int, high: Sequence[_Plane]
    ) -> tuple[Coding, list[SlotPart]]:
        """Return the coding of a chunk, and its parts: planes that are stored raw come first."""
        layout = self._layout
        dtype = dtypes.dtype(layout.chunks[i].dtype)
        width, plane = dtype.width, layout.nbytes[i] // dtype.width
        found = dict(zip(self._high[i], high, strict=True))
        between = [p for p in range(1, width) if p not in found]
        for at, p in enumerate(between):
            first = middle + layout.starts[i] * len(between) + at * plane
            found[p] = _Plane(parts(batch.runs[0], first, plane), RAW, plane, _NOTHING)
        if 0 not in found:
            run, first, packed = where
            size = plane // 8 * 7 if packed else plane
            found[0] = _Plane(parts(batch.runs[run], first, size), PACK7 if packed else RAW, size, _NOTHING)
        ordered = sorted(found, key=lambda p: (found[p].codec != RAW, p))
        codecs, stored = (tuple(of) for of in zip(*((found[p].codec, found[p].stored) for p in range(width)), strict=True))
        streams = b"".join(found[p].streams for p in ordered)
        coding = Coding(width > 1, width > 1 and dtype.rotate, codecs, stored, streams, layout.streams[i])
        return coding, _joined(part for p in ordered for part in found[p].parts)

    def _tops(self, arrived: CodedBatches) -> Iterator[list[_Plane]]:
        """Yield the coded planes of each chunk, ascending."""
        assert arrived.planes is not None
        layout, coded = self._layout, arrived.planes
        sizes, stream, at = np.frombuffer(coded.lengths, "<i4"), 0, 0
        for batch in arrived.batches:
            for i in range(*layout.batches[batch.number][:2]):
                plane = layout.nbytes[i] // dtypes.dtype(layout.chunks[i].dtype).width
                found = list[_Plane]()
                for _ in self._high[i]:
                    mine = sizes[stream : stream + math.ceil(plane / layout.streams[i])]
                    size = int(mine.sum())
                    smaller = size < plane
                    streams = mine.astype("<i4").tobytes() if smaller else _NOTHING
                    found.append(_Plane(parts(coded.spans, at, size), coded.codec if smaller else RAW, size, streams))
                    stream, at = stream + len(mine), at + size
                yield found


def _digests(arrived: CodedBatches) -> Iterator[bytes]:
    """Yield the digest of each chunk, without end; empty if there is none."""
    for start in range(0, len(arrived.digests), _DIGEST):
        digest = arrived.digests[start : start + _DIGEST]
        yield digest if any(digest) else _NOTHING
    while True:
        yield _NOTHING


def _joined(found: Iterable[SlotPart]) -> list[SlotPart]:
    """Merge parts that follow each other in a slot."""
    joined = list[SlotPart]()
    for slot, at, size in found:
        if joined and joined[-1][0] == slot and sum(joined[-1][1:]) == at:
            slot, at, size = slot, joined[-1][1], joined.pop()[2] + size
        joined.append((slot, at, size))
    return joined


def _planes(mask: int) -> tuple[int, ...]:
    return tuple(p for p in range(mask.bit_length()) if mask >> p & 1)
