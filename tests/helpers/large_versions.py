"""Versions of several nodes whose manifests are read one fragment at a time."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from helpers.builders import empty_record, rows_and_pack
from raystow.storage.coding.chunk import reference
from raystow.storage.coding.digest import stored_digest
from raystow.storage.commit.committer import Committer
from raystow.storage.format import keys
from raystow.storage.format.manifest import Fragment, Value
from raystow.storage.repository import Repository
from raystow.storage.versions import stored_manifest
from raystow.storage.versions.version import Version

ROWS = 6
"""Rows of a tensor on each node."""

LITTLE = 400
"""Bytes of memory for a row whose fragment is read ahead; as an object it takes 1,000."""


def save(repository: Repository, nodes: int, tensors: int = 2, *, first: int = 0, base: int | None = None) -> Version:
    """Commit a version whose tensors have ``ROWS`` rows on each node, and whose ranks have a value each. ``first``: the number of
    the node with the first rank; saves give nodes other numbers. ``base``: all but the first tensor are references to it."""
    record = empty_record(committer := Committer(repository, "me"))
    whole = np.arange(nodes * ROWS * 4, dtype=np.float32).reshape(nodes * ROWS, 4)
    infos = []
    for rank in range(nodes):
        node = (first + rank) % nodes
        boxes = [((rank * ROWS + row, 0), (1, 4)) for row in range(ROWS)]
        alike = {f"t{number}": (whole, boxes) for number in range(1, tensors)}
        rows, data = rows_and_pack({"t0": (whole + record.id, boxes), **(alike if base is None else {})})
        if base is not None:
            same = {"pack": 0, "start": 0, "coding": reference(base), "stored_digest": stored_digest()}
            rows += [structs.replace(row, **same) for row in rows_and_pack(alike)[0]]
        values = (Value("rank", '["rank"]', str(rank), (rank,)), Value("epoch", '["epoch"]', str(record.id), (rank,)))
        fragment = Fragment(node, tuple(structs.replace(row, node=node) for row in rows), values)
        repository.store.put(keys.pack(record.id, record.attempt, node, "weights", 0), [data])
        repository.store.put(keys.fragment(record.id, record.attempt, node), [stored := fragment.dump()])
        infos.append(fragment.info(stored, [rank]))
    return committer.commit(replace(record, world_size=nodes, fragments=tuple(infos), packs=None))


def keep_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Set the number of rows from which on a manifest is large."""
    monkeypatch.setattr(stored_manifest, "KEPT", rows)


def peak_of(work: Callable[[], object]) -> int:
    """Return the most bytes that Python objects and arrays take at a time while ``work`` runs, in addition to those before."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
