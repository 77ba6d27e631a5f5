"""Codes the chunks of one attempt on one node, packs them, and collects their manifest rows."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from ...state.chunk_info import HOST_CHUNK
from ...storage.coding import delta, dtypes
from ...storage.coding.chunk import RAW, ChunkEncoder, Coding
from ...storage.coding.derived import Derivation
from ...storage.coding.digest import digest_pair, process_keys, stored_digest
from ...storage.coding.kernels import Bytes
from ...storage.coding.rounded import Rounded
from ...storage.errors import SaveFailed
from ...storage.format import keys
from ...storage.format.manifest import Chunk, Fragment, Value
from ...storage.runtime.gc_pause import uncollected
from ...storage.runtime.memory_budget import MemoryBudget
from ..cache.base_version import BaseVersion, Identity, KnownChunks
from ..protocol.messages import AttemptKey, Ticket
from .packer import Packer

Coded = tuple[Chunk, list[memoryview], Callable[[], None]]
"""A chunk's row as announced, without place, and with ``stored_digest`` if a GPU has computed it; its coded bytes; and what to
call when they are no longer needed, also after an error."""

CHECKED = 64  # of so many digests that GPUs have computed for a rank, one is checked: the first, and others later
_scratch = threading.local()


class ChunkWriter:
    """Turns chunks into rows of a manifest fragment. Methods may be called from any thread.

    A node worker uses one for each attempt, and so does a process that saves without a node worker.

    Args:
        packer: Gathers and uploads the coded bytes.
        budget: Bytes of raw and coded chunks in memory. The caller acquires ``chunk.nbytes`` before it calls ``encode``.
        ticket: The attempt, and the number of this node in it.
        base: An earlier version, which unchanged chunks refer to.
    """

    def __init__(self, packer: Packer, budget: MemoryBudget, ticket: Ticket, base: BaseVersion | None = None) -> None:
        self._packer, self._budget, self._ticket, self._base = packer, budget, ticket, base
        self._lock = threading.Lock()
        self._stored: list[Chunk] = []
        self._derived: list[Chunk] = []
        self._second: dict[Identity, int] = {}
        self._given: dict[int, Iterator[int]] = defaultdict(itertools.count)  # digests that GPUs have computed, by rank

    @property
    def stored(self) -> Sequence[Chunk]:
        """The rows of all chunks that are not derived."""
        return self._stored

    def encode(self, chunk: Chunk, raw: Bytes) -> Chunk:
        """Code a chunk and pack the result, unless the base has the same bytes; return its row.

        The budget keeps only what the coded bytes need, until they are uploaded.

        Args:
            chunk: The row as announced, without coding and place.
            raw: The chunk's elements.
        """
        try:
            digest, second = digest_pair(raw, process_keys())
            chunk = replace(chunk, raw_digest=digest)
            if (row := self._referenced(chunk, second)) is not None:
                self._budget.release(raw.size)
                return row
            coding, coded = encode(chunk.dtype, raw, self._delta_base(chunk))
            chunk = replace(chunk, coding=coding, stored_digest=stored_digest(coded))
        except BaseException:
            self._budget.release(raw.size)
            raise
        size = len(coded)
        self._budget.release(raw.size - size)
        (row,) = self._pack([(chunk, [coded], lambda: self._budget.release(size))])
        return row

    def append(self, rank: int, chunks: Sequence[Coded]) -> list[Chunk]:
        """Pack coded chunks of a rank, but for those of which the base has the same bytes; return the rows of all.

        Of the digests that GPUs have computed for a rank in this save, the first and every 64th after it are checked;
        ``SaveFailed`` if one is wrong, and none of these chunks is packed.
        """
        same, new = list[tuple[Chunk, Callable[[], None]]](), list[Coded]()
        try:
            for chunk, coded, release in chunks:
                second = self._second.get((chunk.name, chunk.box), 0)
                if second and (row := self._referenced(chunk, second)) is not None:
                    same.append((row, release))
                else:
                    new.append((replace(chunk, stored_digest=self._digest(rank, chunk, coded)), coded, release))
        except BaseException:
            release_all(chunks)
            raise
        for _, release in same:
            release()
        return [*self._pack(new), *(row for row, _ in same)]

    def append_raw(self, rank: int, chunks: Sequence[Coded]) -> list[Chunk]:
        """Do as ``append`` with chunks whose elements are stored as they are, each in one part: compute their digests first."""
        digested = list[Coded]()
        try:
            for chunk, parts, release in chunks:
                digest, second = digest_pair(np.frombuffer(parts[0], np.uint8), process_keys())
                self.note(chunk, second)
                raw = Coding(False, False, (RAW,), (parts[0].nbytes,))
                digested.append((replace(chunk, raw_digest=digest, coding=raw), parts, release))
        except BaseException:
            release_all(chunks)
            raise
        return self.append(rank, digested)

    def note(self, chunk: Chunk, second: int) -> None:
        """Remember the second number of ``digest_pair`` of a chunk that comes later."""
        with self._lock:
            self._second[chunk.name, chunk.box] = second

    def refer(self, chunk: Chunk, second: int, base: KnownChunks | None) -> Chunk:
        """Add a chunk that a training process has found to be the same as in the version ``base``; return its row.

        ``SaveFailed`` if no version that is known here has it: its bytes were not sent.
        """
        row = self._referenced(chunk, second)
        if row is None and base is not None and (row := base.reference(chunk, second)) is not None:
            with self._lock:
                self._stored.append(row)
        if row is None:
            raise SaveFailed("it has not changed, but the version that has its bytes is not known any more", subject=chunk.name)
        return row

    def known(self, attempt: AttemptKey) -> KnownChunks:
        """Return all rows, for later saves to refer to: the attempt is version ``attempt`` now."""
        rows = (*self._stored, *self._placed())
        before = self._base.chunks.attempts if self._base is not None else {}
        bases = {row.coding.base for row in rows}
        attempts = {id: of for id, of in before.items() if id in bases} | {attempt.id: attempt}
        return KnownChunks(attempt, {(row.name, row.box): row for row in rows}, self._second, attempts)

    def _referenced(self, chunk: Chunk, second: int) -> Chunk | None:
        """Add the row of an unchanged chunk, and remember the digest of any."""
        row = self._base.chunks.reference(chunk, second) if self._base is not None else None
        with self._lock:
            self._second[chunk.name, chunk.box] = second
            if row is not None:
                self._stored.append(row)
        return row

    def _delta_base(self, chunk: Chunk) -> tuple[int, Bytes] | None:
        """Return the base of a delta: a version's id and its bytes, in memory of this thread."""
        if self._base is None:
            return None
        scratch = getattr(_scratch, "base", None)
        if scratch is None:
            scratch = _scratch.base = np.empty(HOST_CHUNK, np.uint8)
        found = self._base.elements(chunk, scratch)
        return None if found is None else (self._base.id, found)

    def _pack(self, chunks: Sequence[Coded]) -> list[Chunk]:
        """Pack chunks with their digests; return the rows with their places."""
        try:
            places = self._packer.add([(chunk.group, coded, release) for chunk, coded, release in chunks])
        except BaseException:
            release_all(chunks)
            raise
        rows = [replace(chunk, pack=pack, start=start) for (chunk, _, _), (pack, start) in zip(chunks, places, strict=True)]
        with self._lock:
            self._stored += rows
        return rows

    def _digest(self, rank: int, chunk: Chunk, coded: list[memoryview]) -> bytes:
        if chunk.stored_digest and next(self._given[rank]) % CHECKED:
            return chunk.stored_digest
        digest = stored_digest(*coded)
        if chunk.stored_digest not in (b"", digest):
            raise SaveFailed("its bytes in host memory are not those whose digest the GPU has computed", subject=chunk.name)
        return digest

    def add_derived(self, chunk: Chunk) -> None:
        """Add the row of a chunk that follows from another one, which may come later."""
        with self._lock:
            self._derived.append(chunk)

    @uncollected()
    def fragment(self, values: Sequence[Value], rounded: Mapping[str, Rounded] | None = None) -> tuple[str, bytes, Fragment]:
        """Build this node's manifest fragment from all rows; return its key, its bytes and itself."""
        node = self._ticket.node
        fragment = Fragment(node, (*self._stored, *self._placed()), tuple(values), rounded or {})
        return keys.fragment(self._ticket.id, self._ticket.attempt, node), fragment.dump(), fragment

    def _placed(self) -> Iterator[Chunk]:
        """Yield the rows of derived chunks, with the place of their source or of the chunk that it refers to."""
        found = {(chunk.name, chunk.box): chunk for chunk in self._stored}
        for chunk in self._derived:
            assert chunk.derivation is not None
            of = found[chunk.derivation.source, chunk.box]
            row = replace(of, name=chunk.name, path=chunk.path, kind=chunk.kind, dtype=chunk.dtype, raw_digest=chunk.raw_digest)
            yield replace(row, derivation=Derivation(of.source, of.words.name))


def release_all(chunks: Iterable[Coded]) -> None:
    """Release the bytes of chunks, which are not packed."""
    for _, _, release in chunks:
        release()


def encode(dtype: str, raw: Bytes, base: tuple[int, Bytes] | None = None) -> tuple[Coding, memoryview]:
    """Code a chunk on this thread; return the coding and the coded bytes.

    With a ``base``, a version's id and the elements of the same chunk there, which are overwritten, the result is the delta to it
    if that is smaller.
    """
    encoder = getattr(_scratch, "encoder", None)
    if encoder is None:
        encoder = _scratch.encoder = ChunkEncoder(HOST_CHUNK)
    as_delta = delta.encode(encoder, raw, dtypes.dtype(dtype), base[1], base[0]) if base is not None else None
    coded, coding = as_delta or encoder.encode(raw, dtypes.dtype(dtype))
    return coding, coded.data


def warm_up() -> None:
    """Load and compile what a coding thread needs, so that the first save does not wait for it; pyarrow loads pandas, if there is
    one, when it builds its first table."""
    Fragment(0, (), (Value("", "", "", ()),)).dump()
    for dtype in ("bfloat16", "float32", "float64"):
        digest_pair(raw := np.zeros(64 << 10, np.uint8), process_keys())
        encode(dtype, raw)
