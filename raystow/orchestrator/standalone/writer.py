"""What one rank stores of a version: coded and uploaded by its own process.

It stands for a node of its own: its packs and its manifest fragment bear the number of the rank.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ...state.chunk_info import HOST_CHUNK
from ...state.chunks import cuts
from ...state.coverage import coverage, total
from ...state.planned_chunk import PlannedChunk
from ...state.shards import Shard
from ...state.tree import Leaf
from ...storage.format import values
from ...storage.format.groups import group
from ...storage.format.manifest import Value, path_text
from ...storage.format.version_record import FragmentInfo, PackInfo
from ...storage.object_store import ObjectStore
from ...storage.runtime.memory_budget import MemoryBudget
from ...storage.runtime.spans import span
from ...workers.packing.attempt import draft
from ...workers.packing.chunk_writer import ChunkWriter
from ...workers.packing.packer import Packer
from ...workers.protocol.messages import Ticket

_UPLOADS = 4


@dataclass(frozen=True)
class StoredPart:
    """``covered``: the sum of ``state.coverage.coverage`` over what was stored and counted."""

    info: FragmentInfo
    covered: int


class StandaloneWriter:
    """One rank's share of an attempt. ``ticket.node`` is the rank. ``memory``: bytes of chunks under way and not uploaded yet."""

    def __init__(self, store: ObjectStore, ticket: Ticket, *, memory: int, threads: int) -> None:
        self._store, self._ticket = store, ticket
        self._budget = MemoryBudget(memory)
        self._coders = ThreadPoolExecutor(threads, "raystow-code")
        self._uploads = ThreadPoolExecutor(_UPLOADS, "raystow-upload")
        self._packer = Packer(store, ticket, uploads=self._uploads, on_error=self._fail)
        self._writer = ChunkWriter(self._packer, self._budget, ticket)
        self._lock = threading.Lock()
        self._packs: tuple[PackInfo, ...] = ()
        self._covered = 0
        self._error: BaseException | None = None

    @contextmanager
    def under_way(self) -> Iterator[StandaloneWriter]:
        """Add and seal within. Whatever is raised there ends the attempt, and this rank's packs are deleted."""
        try:
            with span("save.rank", self._ticket.trace, rank=self._ticket.node, repository=self._store.uri):
                yield self
        except BaseException:
            self._coders.shutdown(wait=True, cancel_futures=True)
            self._packer.discard(delete=True)
            raise
        finally:
            self._coders.shutdown(wait=True)
            self._uploads.shutdown(wait=True)

    def add(self, shard: Shard, *, counted: bool = True) -> None:
        """Store a box of a tensor; waits for the budget. Its memory must not change. ``counted``: it adds to ``covered``."""
        for cut in cuts(shard, HOST_CHUNK):
            piece = PlannedChunk(shard, cut, None, group(shard.leaf.name))
            self._budget.acquire(piece.nbytes, self._relieve)
            self._coders.submit(self._code, piece, counted)

    def seal(self) -> None:
        """Make all packs durable. Raises what coding or the store raised, ``DeadlineExceeded`` if the store takes too long."""
        self._coders.shutdown(wait=True)
        self._check()
        self._packs = tuple(self._packer.seal())
        self._packer.finish(self._ticket.timeout)

    @property
    def nbytes(self) -> int:
        """Bytes of the sealed packs."""
        return sum(pack.size for pack in self._packs)

    def finish(self, values: Sequence[Value]) -> StoredPart:
        """Store the manifest fragment, after ``seal``. ``values``: the plain values in it, of any ranks."""
        key, data, fragment = self._writer.fragment(values)
        with span("save.upload", self._ticket.trace, key=key, bytes=len(data)):
            self._store.put(key, [data])
        return StoredPart(fragment.info(data, [self._ticket.node]), self._covered)

    def _code(self, piece: PlannedChunk, counted: bool) -> None:
        try:
            if self._error is not None:
                self._budget.release(piece.nbytes)
                return
            raw = np.empty(piece.nbytes, np.uint8)
            piece.copy(raw)
            chunk = self._writer.encode(draft(piece.describe(), self._ticket.node), raw)
            if counted:
                with self._lock:
                    self._covered = total((self._covered, coverage(chunk.name, chunk.dtype, chunk.shape, chunk.box)))
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _relieve(self) -> None:
        """Let the budget shrink, unless that is no longer worth waiting for."""
        self._check()
        self._packer.flush()


def value_of(leaf: Leaf, rank: int) -> Value:
    """The row of a plain value of a rank."""
    return Value(leaf.name, path_text(leaf.path), values.dumps(leaf.value), (rank,))


def merged(rows: Iterable[Value]) -> list[Value]:
    """The rows of several ranks, with one for all ranks that have the same value under a name."""
    ranks: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for row in rows:
        ranks[row.name, row.path, row.text].extend(row.ranks)
    alike: dict[tuple[int, ...], tuple[int, ...]] = {}  # most values are of all ranks
    return [Value(*key, alike.setdefault(tuple(of), tuple(of))) for key, of in ranks.items()]


def cores() -> int:
    """The cores that one rank of this machine may use to code."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")  # set by torchrun
    return max(1, here // max(1, int(ranks) if ranks.isdigit() else 1))
