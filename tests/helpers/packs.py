"""Versions with several small packs, written without a checkpointer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from msgspec import structs

from helpers.builders import empty_record, rows_and_pack, whole
from raystow.storage.coding.digest import stored_digest
from raystow.storage.commit.committer import Committer
from raystow.storage.format import keys
from raystow.storage.format.manifest import Chunk, Fragment
from raystow.storage.format.version_record import FragmentInfo, PackInfo
from raystow.storage.repository import Repository
from raystow.storage.versions.version import Version


def write_packs(repository: Repository, packs: Mapping[int, np.ndarray], *, raw: int | None = None) -> Version:
    """Commit a version with one array in each pack, named by the number of the pack. ``raw``: the decoded bytes according to
    the record.
    """
    record = empty_record(committer := Committer(repository, "me"))
    rows = list[Chunk]()
    sizes = dict[int, int]()
    for number, array in packs.items():
        new, data = rows_and_pack({f"t{number}": whole(array)})
        repository.store.put(keys.pack(record.id, record.attempt, 0, "weights", number), [data])
        rows += [structs.replace(row, pack=number) for row in new]
        sizes[number] = len(data)
    fragment = Fragment(0, tuple(rows), ()).dump()
    repository.store.put(keys.fragment(record.id, record.attempt, 0), [fragment])
    nbytes = sum(array.nbytes for array in packs.values()) if raw is None else raw
    info = FragmentInfo(0, len(fragment), stored_digest(fragment).hex(), (0,), len(rows), nbytes, sum(sizes.values()))
    recorded = tuple(PackInfo(0, "weights", number, size) for number, size in sizes.items())
    return committer.commit(replace(record, fragments=(info,), packs=recorded))


def noise(nbytes: int, seed: int = 0) -> np.ndarray:
    """Return bytes that no codec compresses."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def pack_key(version: Version, number: int) -> str:
    return keys.pack(version.id, version.attempt, 0, "weights", number)


def flip(repository: Repository, key: str) -> bytes:
    """Change one byte of an object. Return its previous content."""
    data = repository.store.get(key, max_bytes=1 << 30)
    at = len(data) // 2
    repository.store.put(key, [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]])
    return data
