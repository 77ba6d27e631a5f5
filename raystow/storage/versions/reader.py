"""Reads boxes of tensors from packs: coalesced ranges, several in parallel, every digest checked before bytes are used."""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..coding.kernels import Bytes
from ..errors import Damaged, NotFound
from ..format import keys
from ..format.boxes import Box, overlap, tile, within
from ..format.manifest import Chunk
from ..object_store import Buffer, ObjectStore
from ..runtime.bounded_map import bounded_map
from ..runtime.clock import SYSTEM
from ..runtime.spans import Span, span
from .runs import RUN, ByteRun, Piece, Target, coalesced

_Pack = tuple[int, str, int, str, int]  # version, attempt, node, group, number


@dataclass(frozen=True)
class Request:
    """A box of one tensor to read into ``target`` (shape: the box's extent; any strides; items of the dtype's size): a numpy
    array, or for ``workers.gpu.decode.decoder`` a torch tensor of words on a GPU. ``chunks``: at least the rows that overlap the
    box."""

    name: str
    chunks: Sequence[Chunk]
    box: Box
    target: Target


class BaseChunks(Protocol):
    """Finds the chunks of earlier versions that a version needs: ``Bases``, whose module imports this one."""

    def run(self, chunk: Chunk) -> ByteRun:
        """What must be fetched for a chunk that is a delta."""

    def referenced(self, chunk: Chunk) -> tuple[PackReader, Chunk]:
        """The row of a reference with the place and coding of the bytes that it refers to, and the reader of their version."""


class PackReader:
    """Reads from the packs of one version. ``bases``: finds chunks of other versions. ``threads``: parallel requests and
    decodings. ``turn``: the part of the runs, from 0 to 1, that comes last instead of first, so that ranks that share reads begin
    differently.

    Attributes:
        trace: Of the span of these reads; "" if they are not traced.
    """

    def __init__(
        self,
        store: ObjectStore,
        version: int,
        attempt: str,
        *,
        bases: BaseChunks,
        threads: int | None = None,
        turn: float = 0.0,
    ) -> None:
        self._store, self._version, self._attempt, self._bases, self._turn = store, version, attempt, bases, turn
        self.trace = ""
        self._range_bytes: int = getattr(store, "range_bytes", RUN)
        # Threads that wait for a network leave cores free; those that read files do not, and only contend for the GIL.
        per_core = 2 if self._range_bytes == RUN else 1
        self.threads = threads or min(16, per_core * (os.cpu_count() or 1))

    def fill(self, requests: Iterable[Request], progress: Callable[[int], None] = lambda nbytes: None) -> None:
        """Fill every request's target; see ``complete``."""
        self.complete(self.runs(requests), progress)

    def complete(self, runs: Sequence[ByteRun], progress: Callable[[int], None] = lambda nbytes: None) -> None:
        """Fill the targets of ``runs``; ``progress`` is called with the decoded bytes of each chunk.

        Raises ``Damaged`` naming pack and tensor, ``StateError`` if a target was changed while it was filled, or the store's
        error; then the content of the targets is undefined. Takes 16
        MiB of stored bytes and one chunk for each thread, of which the caller's is one.
        """
        # Of a file, smaller ranges: they take less memory, and are as fast.
        if self._range_bytes < RUN:
            runs = [part for run in runs for part in coalesced(run.key, run.pieces, self._range_bytes)]
        threads = max(1, min(self.threads, len(runs)))
        left = deque[ByteRun | None]([*runs, *[None] * threads])
        longest = max((run.length for run in runs), default=0)

        def work() -> None:
            memory = np.empty(longest, np.uint8).data  # for all runs: pages of new memory cost as much as a copy
            try:
                while (run := left.popleft()) is not None:
                    self._decode(run, progress, memory[: run.length])
            except BaseException:
                left.extendleft([None] * threads)  # ends the other threads
                raise

        with ThreadPoolExecutor(threads, "raystow-read") as pool:
            others = [pool.submit(work) for _ in range(threads - 1)]
            work()
        for other in others:
            other.result()

    def check(self, runs: Iterable[tuple[str, ByteRun]], progress: Callable[[int], None], *, memory: int) -> Iterator[str]:
        """Read and decode runs and check each chunk's digests; yields the name of each run that is whole, in order. Takes runs as
        it reads them, at the same time as many as fit into ``memory`` bytes, at least one."""

        def decoded(named: tuple[str, ByteRun]) -> str:
            name, run = named
            self._decode(run, progress)
            return name

        with ThreadPoolExecutor(self.threads, "raystow-read") as pool:
            yield from bounded_map(pool, decoded, runs, cost=lambda named: named[1].cost, limit=memory)

    def whole(self, parts: Iterable[Chunk]) -> list[ByteRun]:
        """The runs to fetch to read chunks whole."""
        return self._runs([self._piece(chunk) for chunk in parts])

    def runs(self, requests: Iterable[Request]) -> list[ByteRun]:
        """The runs to fetch to fill the requests. Raises ``Damaged`` unless the manifest's chunks tile each of them."""
        pieces = list[tuple[_Pack, Piece]]()
        for request in requests:
            parts = list[Box]()
            for chunk in request.chunks:
                part = overlap(request.box, box := chunk.box)
                if part is not None:
                    target = request.target if part == request.box else request.target[within(part, request.box) + (...,)]
                    source = () if part == box else within(part, box)
                    pieces.append(self._piece(chunk, source, target, part == box))
                    parts.append(part)
            if not tile(parts, request.box):
                what = f"the manifest's chunks do not hold each element of the box {request.box} exactly once"
                raise Damaged(what, subject=request.name)
        return self._runs(pieces)

    def read(self, run: ByteRun, into: memoryview | None) -> Buffer:
        """A run's bytes: a ``ReadRun``."""
        try:
            with span("restore.fetch", self.trace, key=run.key, bytes=run.length):
                if into is None:
                    return self._store.get_range(run.key, run.start, run.length)
                self._store.get_range_into(run.key, run.start, into)
                return into
        except NotFound:
            raise Damaged("the pack is missing", subject=run.key) from None

    def _piece(
        self, chunk: Chunk, source: tuple[slice, ...] = (), target: Target = None, direct: bool = False
    ) -> tuple[_Pack, Piece]:
        """A piece, and the pack of its bytes: of a reference that of another version."""
        reader = self
        if chunk.is_reference:
            reader, chunk = self._bases.referenced(chunk)
        base = None if chunk.coding.base is None else reader._bases.run(chunk)
        pack = reader._version, reader._attempt, chunk.node, chunk.group, chunk.pack
        return pack, Piece(chunk, source, target, direct, base)

    def _runs(self, pieces: list[tuple[_Pack, Piece]]) -> list[ByteRun]:
        packs: dict[_Pack, list[Piece]] = defaultdict(list)
        for pack, piece in pieces:
            packs[pack].append(piece)
        runs = [run for pack, of in sorted(packs.items()) for run in coalesced(keys.pack(*pack), of)]
        first = int(len(runs) * self._turn)
        return runs[first:] + runs[:first]

    def _decode(self, run: ByteRun, progress: Callable[[int], None], memory: memoryview | None = None) -> None:
        """Read a run, check it, and fill the targets of its pieces. ``memory``: for its stored bytes."""
        fetched = SYSTEM.monotonic()

        def read(of: ByteRun, into: memoryview | None) -> Buffer:
            nonlocal fetched
            data = self.read(of, into)
            fetched = SYSTEM.monotonic()
            return data

        for piece, raw in run.elements(read, _own_memory, memory=memory):
            chunk, target = piece.chunk, piece.target
            # Bounds are compared, within which a strided target may have the memory of another target.
            if target is not None and not (target.flags.c_contiguous and np.may_share_memory(raw, target)):
                target[...] = raw.view(target.dtype).reshape(chunk.extent)[piece.source]
            progress(chunk.nbytes)
        Span("restore.decode", self.trace, begun=fetched, key=run.key, chunks=len(run.pieces)).end()


def _own_memory(piece: Piece) -> Bytes | None:
    """Where a piece's elements go, if they are all of the chunk, contiguous."""
    target = piece.target
    return target.reshape(-1).view(np.uint8) if piece.direct and target.flags.c_contiguous else None
