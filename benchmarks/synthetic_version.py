"""A version of thousands of nodes in a folder, without its packs: what reads the manifest meets real rows and sizes.

A pack has 16 bytes for each chunk, all zero; the store makes it when it is read, and lists it. The rows of all nodes differ in
their boxes only. Requests are counted as an S3 server gets them: 1,000 keys to a page of a listing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from control_plane_save import RANKS, fragment
from msgspec import structs

from raystow.storage.coding.digest import stored_digest
from raystow.storage.commit.committer import Committer
from raystow.storage.format import keys
from raystow.storage.format.manifest import Chunk, Fragment, numbers
from raystow.storage.format.version_record import FragmentInfo, VersionRecord
from raystow.storage.object_store import Buffer, ObjectInfo
from raystow.storage.repository import Repository, create_repository
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores.local import LocalStore

STORED = 16
"""Bytes of a chunk."""

KEYS = 1000
"""Keys of one request."""


class SyntheticStore(LocalStore):
    """A folder to which packs of ``nodes`` nodes are added, unless it is a replica to which fewer were written. ``requests``: by
    kind; ``nbytes``: that were read of other objects than packs."""

    def __init__(self, root: Path, nodes: int, packs: dict[str, list[int]], *, replica: bool = False) -> None:
        super().__init__(root)
        self.requests, self.nbytes = Counter[str](), 0
        self._nodes, self._packs, self._lock = nodes, packs, threading.Lock()
        self._missing = nodes * sum(map(len, packs.values())) if replica else 0

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """As the protocol says."""
        for count, info in enumerate(self._merged(prefix), 1):
            yield info
            if count % KEYS == 0:
                self._note("list")
        self._note("list")

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """As the protocol says."""
        data = super().get(key, max_bytes=max_bytes)
        self._note("get")
        self.nbytes += len(data)
        return data

    def get_range(self, key: str, start: int, length: int) -> Buffer:
        """As the protocol says."""
        self._note("get range")
        return bytes(length)

    def get_range_into(self, key: str, start: int, target: memoryview) -> None:
        """As the protocol says."""
        self._note("get range")
        target[:] = bytes(len(target))

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """As the protocol says; packs are not kept."""
        self._note("put")
        if not key.endswith(".pack"):
            super().put(key, parts)
            return
        with self._lock:
            self._missing -= 1

    def _note(self, kind: str) -> None:
        with self._lock:
            self.requests[kind] += 1

    def _merged(self, prefix: str) -> Iterator[ObjectInfo]:
        """The packs of one group, or the real objects."""
        group = prefix.rpartition("/")[2].partition("-")[0]
        if group not in self._packs:
            yield from super().list(prefix)
            return
        if self._missing > 0:
            return
        place = keys.attempt_of(f"{prefix}00000-00000.pack")
        assert place is not None
        for node in range(self._nodes):
            for number, size in enumerate(self._packs[group]):
                yield ObjectInfo(keys.pack(*place, node, group, number), size, 0.0)


def build(folder: Path, nodes: int) -> dict[str, list[int]]:
    """Commit a version of so many nodes to the folder; return the sizes of a node's packs by group."""
    repository = create_repository(str(folder))
    committer = Committer(repository, "benchmark")
    id, attempt = committer.reserve()
    pattern, report = fragment(0, nodes)
    rows, packs = _small(pattern.chunks)
    table = pq.read_table(pa.BufferReader(Fragment(0, rows, ()).dump()))
    offsets = numbers(table["offset"].combine_chunks().values).reshape(-1, 2)
    shards = numbers(table["extent"].combine_chunks().values).reshape(-1, 2)[:, 0]
    infos = list[FragmentInfo]()
    for node in range(nodes):
        moved = offsets.copy()
        moved[:, 0] += node * RANKS * shards
        lists = pa.ListArray.from_arrays(pa.array(range(0, 2 * len(moved) + 1, 2), pa.int32()), pa.array(moved.reshape(-1)))
        sink = pa.BufferOutputStream()
        pq.write_table(table.set_column(table.schema.get_field_index("offset"), "offset", lists), sink, compression="zstd")
        data = bytes(sink.getvalue())
        repository.store.put(keys.fragment(id, attempt, node), [data])
        size, ranks = len(data), tuple(range(node * RANKS, (node + 1) * RANKS))
        info = replace(report.info, node=node, size=size, ranks=ranks, digest=stored_digest(data).hex())
        infos.append(replace(info, stored=STORED * len(rows), packs=sum(map(len, packs.values()))))
    record = VersionRecord(repository.id, id, attempt, committer.epoch, 1, SYSTEM.now(), nodes * RANKS, packs=None)
    committer.commit(replace(record, fragments=tuple(infos)))
    return packs


def opened(folder: Path, nodes: int, packs: dict[str, list[int]]) -> tuple[Repository, SyntheticStore]:
    """Return the repository that ``build`` made, and its store."""
    store = SyntheticStore(folder, nodes, packs)
    return create_repository(store), store


def _small(chunks: Sequence[Chunk]) -> tuple[tuple[Chunk, ...], dict[str, list[int]]]:
    """The rows with few stored bytes in the same packs, and the sizes of these by group."""
    rows, packs, digest = list[Chunk](), dict[str, list[int]](), stored_digest(bytes(STORED))
    for chunk in chunks:
        sizes = packs.setdefault(chunk.group, [])
        if chunk.pack == len(sizes):
            sizes.append(0)
        planes = len(chunk.coding.stored)
        coding = structs.replace(chunk.coding, stored=(STORED // planes,) * planes)
        rows.append(structs.replace(chunk, start=sizes[chunk.pack], coding=coding, stored_digest=digest))
        sizes[chunk.pack] += STORED
    return tuple(rows), packs


class Replica(SyntheticStore):
    """An empty folder to which packs are written."""

    def __init__(self, root: Path, nodes: int, packs: dict[str, list[int]]) -> None:
        super().__init__(root, nodes, packs, replica=True)
