"""Reads boxes of tensors out of packs: coalesced ranges, several at a time, every digest checked before a byte is believed."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import chunk as chunks
from . import dtypes, keys
from .boxes import Box, overlap, tile, within
from .digest import raw_digest, stored_digest
from .errors import Damaged, NotFound, Unsupported
from .kernels import Bytes
from .manifest import Chunk
from .object_store import ObjectStore

Target = npt.NDArray[Any]

_RUN = 16 << 20  # bytes; adjacent chunks are fetched together up to here
_GAP = 64 << 10  # bytes; a hole of this size costs less than another request


@dataclass(frozen=True)
class Request:
    """Fill ``target`` (shape: the box's extent; any strides; items of the dtype's size) with the box of one tensor.

    ``chunks``: the tensor's rows, or at least those that overlap the box.
    """

    name: str
    chunks: Sequence[Chunk]
    box: Box
    target: Target


@dataclass(frozen=True)
class _Piece:
    """The part of a chunk that one request wants, if any, and where it goes."""

    chunk: Chunk
    source: tuple[slice, ...] = ()
    target: Target | None = None


class Reader:
    """Reads from the packs of one version. ``threads``: requests and decodings at a time."""

    def __init__(self, store: ObjectStore, version: int, attempt: str, *, threads: int | None = None) -> None:
        self._store, self._version, self._attempt = store, version, attempt
        self._threads = threads or min(16, 2 * (os.cpu_count() or 1))

    def fill(self, requests: Iterable[Request], progress: Callable[[int], None] = lambda nbytes: None) -> None:
        """Fill every request's target; ``progress`` is told the decoded bytes of each finished chunk.

        Raises ``Damaged`` naming the pack and the tensor, or the store's error; what the targets hold is undefined then.
        Memory beyond the targets: for each thread 16 MiB of stored bytes and one chunk.
        """
        self._run([piece for request in requests for piece in _pieces(request)], progress)

    def check(self, wanted: Iterable[Chunk], progress: Callable[[int], None] = lambda nbytes: None) -> None:
        """Read and decode chunks, hold them against their digests, and keep nothing."""
        self._run([_Piece(chunk) for chunk in wanted], progress)

    def _run(self, pieces: list[_Piece], progress: Callable[[int], None]) -> None:
        packs: dict[tuple[int, str, int], list[_Piece]] = defaultdict(list)
        for piece in pieces:
            packs[piece.chunk.node, piece.chunk.group, piece.chunk.pack].append(piece)
        runs = [run for pack in sorted(packs) for run in _runs(packs[pack])]
        if not runs:
            return
        with ThreadPoolExecutor(min(self._threads, len(runs)), "raystow-read") as pool:
            try:
                for _ in pool.map(lambda run: self._read(run, progress), runs):
                    pass
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _read(self, run: list[_Piece], progress: Callable[[int], None]) -> None:
        first, last = run[0].chunk, run[-1].chunk
        key = keys.pack(self._version, self._attempt, first.node, first.group, first.pack)
        try:
            data = self._store.get_range(key, first.start, last.start + last.coding.size - first.start)
        except NotFound:
            raise Damaged("the pack is missing", subject=key) from None
        stored = np.frombuffer(data, np.uint8)
        for piece in run:
            chunk, begin = piece.chunk, piece.chunk.start - first.start
            try:
                _decode(piece, stored[begin : begin + chunk.coding.size])
            except (Damaged, Unsupported) as error:
                what = f"tensor {chunk.name!r}, bytes {chunk.start} + {chunk.coding.size}: {error.what}"
                raise type(error)(what, subject=key, remedy=error.remedy) from error
            progress(chunk.nbytes)


def _pieces(request: Request) -> list[_Piece]:
    """The overlaps of the request's box with the tensor's chunks; ``Damaged`` unless they tile it."""
    pieces, parts = [], []
    for chunk in request.chunks:
        part = overlap(request.box, chunk.box)
        if part is not None:
            target = request.target[within(part, request.box) + (...,)]
            pieces.append(_Piece(chunk, within(part, chunk.box), target))
            parts.append(part)
    if not tile(parts, request.box):
        what = f"the manifest's chunks do not hold each element of the box {request.box} exactly once"
        raise Damaged(what, subject=request.name)
    return pieces


def _runs(pieces: list[_Piece]) -> list[list[_Piece]]:
    """The pieces of one pack in runs that are fetched by one request each."""
    runs: list[list[_Piece]] = []
    begin = end = 0
    for piece in sorted(pieces, key=lambda piece: (piece.chunk.start, piece.chunk.coding.size)):
        start, size = piece.chunk.start, piece.chunk.coding.size
        if not runs or start > end + _GAP or start + size - begin > _RUN:
            runs.append([])
            begin = start
        runs[-1].append(piece)
        end = start + size
    return runs


def _decode(piece: _Piece, stored: Bytes) -> None:
    """Check, decode, check again, and copy what was asked for."""
    chunk, target = piece.chunk, piece.target
    if stored_digest(stored) != chunk.stored_digest:
        raise Damaged("the stored bytes do not match their digest")
    direct = target is not None and target.shape == chunk.extent and target.flags.c_contiguous
    raw = target.reshape(-1).view(np.uint8) if target is not None and direct else np.empty(chunk.nbytes, np.uint8)
    chunks.decode(chunk.coding, dtypes.dtype(chunk.dtype), stored, raw)
    if raw_digest(raw) != chunk.raw_digest:
        raise Damaged("the decoded bytes do not match their digest")
    if target is not None and not direct:
        target[...] = raw.view(target.dtype).reshape(chunk.extent)[piece.source]
