"""Locates chunks coded by a GPU in host memory. ``CodedLayout`` describes the chunks once, and each save announces only the
differences: fewer messages leave the interpreter lock to the training.

Chunks are read in batches, and planes of several batches are coded together: of most chunks the highest plane, of rounded chunks
others as well. The bytes arrive in runs: of a batch, the lowest planes of all its chunks and then the other raw planes; of a
group of coded planes, one plane after the other.
"""

from __future__ import annotations

import itertools
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
_SIZE = np.dtype("<i4")  # of a stream


class CodedChunk(NamedTuple):
    """A chunk that has arrived. ``parts``: the bytes to store; ``stored_digest``: theirs, empty if no GPU has computed it."""

    info: ChunkInfo
    digest: int
    stored_digest: bytes
    coding: Coding
    parts: list[SlotPart]


class _Plane(NamedTuple):
    """A plane that may have been coded: its place, codec, bytes, and the sizes of its streams (int32)."""

    parts: list[SlotPart]
    codec: str
    stored: int
    streams: bytes


class _Form(NamedTuple):
    """What is the same for a chunk in all saves. ``plane``: bytes of a plane. ``coded``: the planes that may be coded, ascending.
    ``streams``: coded streams per plane. ``raw``: the other planes without the lowest, as first plane and count of each run."""

    width: int
    rotated: bool
    plane: int
    coded: tuple[int, ...]
    streams: int
    raw: tuple[tuple[int, int], ...]


def parts(spans: Sequence[RunSpan], start: int, nbytes: int) -> list[SlotPart]:
    """Return where ``nbytes`` bytes of a run are, from byte ``start``."""
    end, found = start + nbytes, list[SlotPart]()
    for first, slot, at, size in spans:
        low = start if start > first else first
        high = end if end < first + size else first + size
        if low < high:
            found.append((slot, at + low - first, high - low))
    return found


class Layout:
    """Assembles chunks from the messages about their parts. In a node worker, all ranks share one interpreter lock, and a save
    has thousands of chunks: what depends on the layout only is computed once. ``nbytes``: raw bytes of all chunks."""

    def __init__(self, layout: CodedLayout) -> None:
        self._layout = layout
        self.nbytes = sum(layout.nbytes)
        self._forms = [_form(*of) for of in zip(layout.chunks, layout.nbytes, layout.planes, layout.streams, strict=True)]

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
        form = self._forms[i]
        width, plane = form.width, form.plane
        codecs, stored = [RAW] * width, [plane] * width
        raw, coded = list[tuple[int, list[SlotPart]]](), list[list[SlotPart]]()
        if 0 not in form.coded:
            run, first, packed = where
            if packed:
                codecs[0], stored[0] = PACK7, plane // 8 * 7
                coded.append(parts(batch.runs[run], first, stored[0]))
            else:
                raw.append((0, parts(batch.runs[run], first, plane)))
        first = middle + self._layout.starts[i] * sum([count for _, count in form.raw])
        for p, count in form.raw:
            raw.append((p, parts(batch.runs[0], first, count * plane)))
            first += count * plane
        for p, one in zip(form.coded, high, strict=True):
            codecs[p], stored[p] = one.codec, one.stored
            if one.codec == RAW:
                raw.append((p, one.parts))
            else:
                coded.append(one.parts)
        raw.sort()
        streams = b"".join([one.streams for one in high])
        coding = Coding(width > 1, form.rotated, tuple(codecs), tuple(stored), streams, self._layout.streams[i])
        return coding, _joined(itertools.chain(*[place for _, place in raw], *coded))

    def _tops(self, arrived: CodedBatches) -> Iterator[list[_Plane]]:
        """Yield the coded planes of each chunk, ascending."""
        assert arrived.planes is not None
        coded = arrived.planes
        ends = [0, *np.frombuffer(coded.lengths, _SIZE).cumsum(dtype=np.int64).tolist()]  # of the streams in the run
        stream = 0
        for batch in arrived.batches:
            for form in self._forms[slice(*self._layout.batches[batch.number][:2])]:
                found = list[_Plane]()
                for _ in form.coded:
                    after = stream + form.streams
                    start, size = ends[stream], ends[after] - ends[stream]
                    smaller = size < form.plane
                    streams = coded.lengths[stream * _SIZE.itemsize : after * _SIZE.itemsize] if smaller else _NOTHING
                    found.append(_Plane(parts(coded.spans, start, size), coded.codec if smaller else RAW, size, streams))
                    stream = after
                yield found


def _form(chunk: ChunkInfo, nbytes: int, mask: int, stream: int) -> _Form:
    dtype = dtypes.dtype(chunk.dtype)
    width, plane = dtype.width, nbytes // dtype.width
    coded = tuple(p for p in range(mask.bit_length()) if mask >> p & 1)
    raw = list[tuple[int, int]]()
    for p in range(1, width):
        if p not in coded:
            first, count = raw.pop() if raw and sum(raw[-1]) == p else (p, 0)
            raw.append((first, count + 1))
    return _Form(width, width > 1 and dtype.rotate, plane, coded, math.ceil(plane / stream) if coded else 0, tuple(raw))


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
