"""Where the chunks that a GPU has coded lie in host memory. What is the same in every save of the same chunks is said once, in a
``Layout``; after that a save says of them only what differs. The training has better to do than to repeat itself.

Chunks are read in batches, and planes of some batches are coded together: of most chunks the highest, of those that were rounded
others as well. What arrives does so in runs of bytes: of a batch, the lowest planes of all its chunks and then those between;
of what was coded together, one plane behind the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...storage.coding import dtypes
from ...storage.coding.chunk import PACK7, RAW
from ...storage.coding.digest import finish
from ...storage.format.boxes import Box

Part = tuple[int, int, int]
"""Slot, start in the slot, bytes."""

Span = Sequence[int]
"""Of a run: its first byte in it, slot, start in the slot, bytes."""

Message = dict[str, Any]

_NOTHING = b""


class _Plane(NamedTuple):
    """A plane of a chunk: where it lies, what it is coded with, its bytes, and the sizes of its streams (int32)."""

    parts: list[Part]
    codec: str
    stored: int
    streams: bytes


def parts(spans: Sequence[Span], start: int, nbytes: int) -> list[Part]:
    """Where so many bytes of a run lie."""
    end = start + nbytes
    return [
        (slot, at + max(start - first, 0), min(end, first + size) - max(start, first))
        for first, slot, at, size in spans
        if max(start, first) < min(end, first + size)
    ]


def layout(
    chunks: Sequence[Message],
    *,
    nbytes: Any,
    streams: Any,
    high: Sequence[Sequence[int]],
    starts: Any,
    bases: Sequence[int],
    batches: Sequence[Sequence[int]],
) -> Message:
    """What ``Layout`` takes: what is said of each chunk, in the order in which they are read. ``nbytes`` of each one, bytes of a
    plane in its coded ``streams`` (0: it leaves as it is, in one plane), and where its lowest plane ``starts`` in its batch (all
    int64). ``high``: numbers of the planes that are coded. ``bases``: the version that each is a difference to, 0 if it is none.
    Of each batch the first chunk, the one after its last, and the bytes of its lowest planes."""
    masks = [sum(1 << p for p in planes) for planes in high]
    numbers = np.stack([nbytes, streams, starts, masks, bases]).astype("<i8").tobytes()
    return {"chunks": list(chunks), "numbers": numbers, "batches": [list(batch) for batch in batches]}


class Layout:
    """Puts chunks together from what arrives."""

    def __init__(self, message: Message) -> None:
        self._chunks, self._batches = message["chunks"], message["batches"]
        numbers = np.frombuffer(message["numbers"], "<i8").reshape(5, -1).tolist()
        self._nbytes, self._streams, self._starts, masks, self._bases = numbers
        self._high = [_planes(mask) for mask in masks]

    @property
    def boxes(self) -> set[tuple[str, Box]]:
        """Name and box of every chunk."""
        return {(chunk["name"], (tuple(chunk["offset"]), tuple(chunk["extent"]))) for chunk in self._chunks}

    def rows(self, arrived: Message) -> Iterator[Message]:
        """What ``attempt.draft`` takes, for every chunk in ``arrived``.

        ``read``: for each batch its number, ``sums`` (int64, the digests before ``finish``), its runs' spans, and for each chunk
        in which run its lowest plane lies, where, and whether it was packed; nothing, if all are in the first run as they were,
        or are coded. ``coded``: the spans of the planes that were, ``lengths`` (int32) of their streams, and the ``codec``; or
        nothing.
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
        return {"parts": parts(runs[0], self._starts[i], size), "coding": [False, False, [RAW], [size], 1, None], "streams": b""}

    def _coded(
        self, i: int, runs: Sequence[Sequence[Span]], where: tuple[int, int, bool], middle: int, high: Sequence[_Plane]
    ) -> Message:
        """Planes that are stored raw come first, the others behind them."""
        dtype = dtypes.dtype(self._chunks[i]["dtype"])
        width, plane = dtype.width, self._nbytes[i] // dtype.width
        found = dict(zip(self._high[i], high, strict=True))
        between = [p for p in range(1, width) if p not in found]
        for at, p in enumerate(between):
            first = middle + self._starts[i] * len(between) + at * plane
            found[p] = _Plane(parts(runs[0], first, plane), RAW, plane, _NOTHING)
        if 0 not in found:
            run, first, packed = where
            size = plane // 8 * 7 if packed else plane
            found[0] = _Plane(parts(runs[run], first, size), PACK7 if packed else RAW, size, _NOTHING)
        ordered = sorted(found, key=lambda p: (found[p].codec != RAW, p))
        codecs, stored = [found[p].codec for p in range(width)], [found[p].stored for p in range(width)]
        rotated = width > 1 and dtype.rotate and not self._bases[i]
        return {
            "parts": _joined(part for p in ordered for part in found[p].parts),
            "coding": [width > 1, rotated, codecs, stored, self._streams[i], self._bases[i] or None],
            "streams": b"".join(found[p].streams for p in ordered),
        }

    def _tops(self, arrived: Message) -> Iterator[list[_Plane]]:
        """Of each chunk the planes that were coded, ascending."""
        spans, lengths, codec = arrived["coded"]
        sizes, stream, at = np.frombuffer(lengths, "<i4"), 0, 0
        for number, *_ in arrived["read"]:
            for i in range(*self._batches[number][:2]):
                plane = self._nbytes[i] // dtypes.dtype(self._chunks[i]["dtype"]).width
                found = list[_Plane]()
                for _ in self._high[i]:
                    mine = sizes[stream : stream + math.ceil(plane / self._streams[i])]
                    size = int(mine.sum())
                    coded = size < plane
                    streams = mine.astype("<i4").tobytes() if coded else _NOTHING
                    found.append(_Plane(parts(spans, at, size), codec if coded else RAW, size, streams))
                    stream, at = stream + len(mine), at + size
                yield found


def _joined(found: Iterable[Part]) -> list[Part]:
    """Where one part follows the other in its slot, one."""
    joined = list[Part]()
    for slot, at, size in found:
        if joined and joined[-1][0] == slot and sum(joined[-1][1:]) == at:
            slot, at, size = slot, joined[-1][1], joined.pop()[2] + size
        joined.append((slot, at, size))
    return joined


def _planes(mask: int) -> tuple[int, ...]:
    return tuple(p for p in range(mask.bit_length()) if mask >> p & 1)
