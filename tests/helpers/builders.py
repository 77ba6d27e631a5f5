"""Builders for tests: a repository in memory, rows and versions of given arrays, and a state of some layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from raystow.storage.coding import chunk, delta
from raystow.storage.coding.chunk import ChunkEncoder, Coding, Sizes, packed
from raystow.storage.coding.digest import raw_digest, stored_digest
from raystow.storage.coding.dtypes import dtype
from raystow.storage.coding.kernels import Bytes
from raystow.storage.coding.rounded import Rounded
from raystow.storage.commit.committer import Committer
from raystow.storage.format import keys
from raystow.storage.format.boxes import Box
from raystow.storage.format.manifest import Chunk, Fragment, Value, path_text
from raystow.storage.format.root import Entry, Root
from raystow.storage.format.signature import Signer
from raystow.storage.format.version_record import VersionRecord
from raystow.storage.repository import Repository, create_repository
from raystow.storage.root.register import Register
from raystow.storage.runtime.clock import SYSTEM, Clock
from raystow.storage.versions.version import Version

from .scripted_store import ScriptedStore

Cut = tuple[np.ndarray, Sequence[Box]]


def overwrite_root(repository: Repository, change: Callable[[Root], Root]) -> None:
    """Change the root without checking invariants, as only an operator can."""
    Register(repository.store, keys.ROOT, Root.load, repository.clock, max_bytes=1 << 26).update(change)


def whole(array: np.ndarray) -> Cut:
    return array, [((0,) * array.ndim, array.shape)]


def rows_and_pack(
    tensors: Mapping[str, Cut], base: tuple[int, Mapping[str, np.ndarray]] | None = None
) -> tuple[list[Chunk], bytes]:
    """Return the rows and the pack of arrays. ``base``: id and arrays of an earlier version; chunks become deltas if that is
    smaller."""
    rows: list[Chunk] = []
    pack = b""
    encoder = ChunkEncoder(1 << 20)
    for name, (array, boxes) in tensors.items():
        for offset, extent in boxes:
            part = array[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))]
            raw = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            done = None
            if base is not None and name in base[1]:
                former = base[1][name][tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))]
                done = delta.encode(encoder, raw, dtype(array.dtype.name), former.copy().reshape(-1).view(np.uint8), base[0])
            coded, coding = done or encoder.encode(raw, dtype(array.dtype.name))
            stored = coded.tobytes()
            rows.append(
                Chunk(
                    name=name,
                    path=path_text((name,)),
                    kind="array",
                    dtype=array.dtype.name,
                    shape=array.shape,
                    offset=offset,
                    extent=extent,
                    node=0,
                    group="weights",
                    pack=0,
                    start=len(pack),
                    coding=coding,
                    raw_digest=raw_digest(raw),
                    stored_digest=stored_digest(stored),
                )
            )
            pack += stored
    return rows, pack


def coded_row(number: int, dtype: str, size: int, coding: Coding) -> Chunk:
    """Return the row of a whole tensor of ``size`` elements, stored after ``number`` equal ones in its pack."""
    start = number * sum(coding.stored)
    return Chunk(f"t{number}", "[]", "tensor", dtype, (size,), (0,), (size,), 0, "weights", 0, start, coding, 0, b"")


def memory_repository(clock: Clock = SYSTEM, *, signer: Signer | None = None) -> Repository:
    """Return a new, empty repository in the memory of this process."""
    return create_repository(ScriptedStore.named(f"test-{SYSTEM.token()}").uri, clock=clock, signer=signer)


def layers(seed: int, size: int) -> dict[str, Any]:
    """Return four random float32 tensors of ``size`` elements, independent of those of other seeds."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {f"layer{i}": torch.randn(size, generator=generator) for i in range(4)}


def flat(state: Any, path: str = "") -> dict[str, Any]:
    """Return the tensors of nested dicts by their dotted paths."""
    if not isinstance(state, dict):
        return {path: state}
    return {name: leaf for key, part in state.items() for name, leaf in flat(part, f"{path}.{key}".lstrip(".")).items()}


def live_ids(repository: Repository) -> list[int]:
    return [version.id for version in repository.versions()]


def orphans(repository: Repository) -> list[str]:
    """Return the keys of objects that belong to no listed version."""
    listed = {(entry.id, entry.attempt) for entry in repository.root().listed}
    return [info.key for info in repository.store.list(keys.VERSIONS) if keys.attempt_of(info.key) not in listed]


def empty_record(committer: Committer, step: int = 0) -> VersionRecord:
    id, attempt = committer.reserve()
    return VersionRecord(committer.catalog.id, id, attempt, committer.epoch, step, created=1.5, world_size=1)


def write(
    committer: Committer,
    tensors: Mapping[str, Cut],
    values: Sequence[Value] = (),
    base: tuple[int, Mapping[str, np.ndarray]] | None = None,
) -> Version:
    """Commit a version of these arrays, each cut into these boxes, valid or not. ``base``: see ``rows_and_pack``."""
    return write_rows(committer, *rows_and_pack(tensors, base), values)


def complemented(rows: Sequence[Chunk], pack: bytes, name: str) -> tuple[list[Chunk], bytes]:
    """Return rows and their pack with the array ``name`` stored by a codec of the tests: one stream of the complemented bytes.
    ``complement`` decodes it.
    """
    found, stored = list[Chunk](), b""
    for row in rows:
        data, coding = pack[row.start : row.start + row.coding.size], row.coding
        if row.name == name:
            raw = np.empty(row.decoded, np.uint8)
            chunk.decode(coding, row.words, np.frombuffer(data, np.uint8), raw)
            data = (~raw).tobytes()
            coding = Coding(False, False, ("complement",), (raw.size,), packed([raw.size]), raw.size)
        found.append(msgspec.structs.replace(row, start=len(stored), coding=coding, stored_digest=stored_digest(data)))
        stored += data
    return found, stored


def complement(coded: Bytes, sizes: Sizes, stream: int, plane: Bytes) -> None:
    """Decode a plane that ``complemented`` has stored: a row of ``chunk.STREAMED``."""
    plane[:] = ~coded


def write_rows(
    committer: Committer,
    rows: Sequence[Chunk],
    pack: bytes,
    values: Sequence[Value] = (),
    rounded: Mapping[str, Rounded] | None = None,
) -> Version:
    """Commit a version of these rows of one pack. ``rounded``: the manifest's entries for rounded tensors."""
    record = empty_record(committer)
    fragment = Fragment(0, tuple(rows), tuple(values), rounded or {})
    data = fragment.dump()
    store = committer.catalog.store
    store.put(keys.pack(record.id, record.attempt, 0, "weights", 0), [pack])
    store.put(keys.fragment(record.id, record.attempt, 0), [data])
    fields = {**vars(record), "fragments": (fragment.info(data, [0]),), "packs": None}
    return committer.commit(VersionRecord(**fields))


def entry(id: int, step: int | None = None, created: float = 0.0, stored: int = 10) -> Entry:
    """Return the entry of a version in the root; its step is 100 times its id by default."""
    return Entry(id, f"{id:016x}", "00", 1, 100 * id if step is None else step, created, 20, stored)


def difference(id: int, *bases: int, stored: int = 10) -> Entry:
    """Return the entry of a version that is a delta to others."""
    return replace(entry(id, stored=stored), bases=bases)
