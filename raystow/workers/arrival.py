"""Where the chunks that a GPU has coded lie in host memory. What is the same in every save of the same chunks is said once, in a
``Layout``; after that a save says of them only what differs. The training has better to do than to repeat itself.

Chunks are read in batches, and the highest planes of some batches are coded together. What arrives does so in runs of bytes: of a
batch, the lowest planes of all its chunks and then those between; of what was coded together, one plane behind the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..storage import dtypes
from ..storage.chunk import PACK7, RAW
from ..storage.digest import finish

Part = tuple[int, int, int]
"""Slot, start in the slot, bytes."""

Span = Sequence[int]
"""Of a run: its first byte in it, slot, start in the slot, bytes."""

Message = dict[str, Any]


def parts(spans: Sequence[Span], start: int, nbytes: int) -> list[Part]:
    """Where so many bytes of a run lie."""
    end = start + nbytes
    return [
        (slot, at + max(start - first, 0), min(end, first + size) - max(start, first))
        for first, slot, at, size in spans
        if max(start, first) < min(end, first + size)
    ]


def layout(chunks: Sequence[Message], *, nbytes: Any, streams: Any, starts: Any, batches: Sequence[Sequence[int]]) -> Message:
    """What ``Layout`` takes: what is said of each chunk, in the order in which they are read. ``nbytes`` of each one, bytes of a
    plane in its coded ``streams`` (0: it leaves as it is, in one plane), and where its lowest plane ``starts`` in its batch (all
    int64). Of each batch the first chunk, the one after its last, and the bytes of its lowest planes."""
    numbers = np.stack([nbytes, streams, starts]).astype("<i8").tobytes()
    return {"chunks": list(chunks), "numbers": numbers, "batches": [list(batch) for batch in batches]}


class Layout:
    """Puts chunks together from what arrives."""

    def __init__(self, message: Message) -> None:
        self._chunks, self._batches = message["chunks"], message["batches"]
        self._nbytes, self._streams, self._starts = np.frombuffer(message["numbers"], "<i8").reshape(3, -1).tolist()

    def rows(self, arrived: Message) -> Iterator[Message]:
        """What ``attempt.draft`` takes, for every chunk in ``arrived``.

        ``read``: for each batch its number, ``sums`` (int64, the digests before ``finish``), its runs' spans, and for each chunk
        in which run its lowest plane lies, where, and whether it was packed; nothing, if all are in the first run as they were.
        ``coded``: the spans of the highest planes, ``lengths`` (int32) of their streams, and the ``codec``; or nothing.
        """
        tops = self._tops(arrived) if arrived["coded"] else None
        for number, sums, runs, lows in arrived["read"]:
            first, last, low = self._batches[number]
            digests = np.frombuffer(sums, "<i8").tolist()
            for i, digest in zip(range(first, last), digests, strict=True):
                row = {**self._chunks[i], "digest": finish(digest, self._nbytes[i])}
                where = lows[i - first] if lows else (0, self._starts[i], False)
                yield row | (self._raw(i, runs) if tops is None else self._coded(i, runs, where, 0 if lows else low, next(tops)))

    def _raw(self, i: int, runs: Sequence[Sequence[Span]]) -> Message:
        size = self._nbytes[i]
        return {"parts": parts(runs[0], self._starts[i], size), "coding": [False, False, [RAW], [size], 1], "streams": b""}

    def _coded(
        self, i: int, runs: Sequence[Sequence[Span]], where: tuple[int, int, bool], middle: int, top: tuple[list[Part], Any, str]
    ) -> Message:
        """Planes that are stored raw come first, the others behind them."""
        dtype = dtypes.dtype(self._chunks[i]["dtype"])
        width, plane = dtype.width, self._nbytes[i] // dtype.width
        found, sizes, codec = top
        codecs = [RAW] * (width - 1) + [codec]
        stored = [plane] * (width - 1) + [int(sizes.sum()) if codec != RAW else plane]
        ordered = [found]
        if width > 2:
            ordered.insert(0, parts(runs[0], middle + self._starts[i] * (width - 2), plane * (width - 2)))
        if width > 1:
            run, at, packed = where
            if packed:
                codecs[0], stored[0] = PACK7, plane // 8 * 7
            lowest = parts(runs[run], at, stored[0])
            ordered.insert(0 if not packed else len(ordered) - 1 if codec != RAW else len(ordered), lowest)
        planes = width > 1
        return {
            "parts": [part for some in ordered for part in some],
            "coding": [planes, planes and dtype.rotate, codecs, stored, self._streams[i]],
            "streams": sizes.astype("<i4").tobytes() if codec != RAW else b"",
        }

    def _tops(self, arrived: Message) -> Iterator[tuple[list[Part], Any, str]]:
        """Of each chunk's highest plane: where it lies, the sizes of its streams, and what it is coded with."""
        spans, lengths, codec = arrived["coded"]
        sizes, stream, at = np.frombuffer(lengths, "<i4"), 0, 0
        for number, *_ in arrived["read"]:
            for i in range(*self._batches[number][:2]):
                plane = self._nbytes[i] // dtypes.dtype(self._chunks[i]["dtype"]).width
                mine = sizes[stream : stream + math.ceil(plane / self._streams[i])]
                size = int(mine.sum())
                yield parts(spans, at, size), mine, codec if size < plane else RAW
                stream, at = stream + len(mine), at + size
