"""Reading on several threads: an error in one of them ends the others."""

from __future__ import annotations

import itertools

import pytest
import torch
from local_cluster import LocalCluster

from raystow.storage.errors import StoreUnavailable
from raystow.storage.reader import Run
from raystow.storage.stores.memory import MemoryStore


def test_an_error_ends_the_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster("memory://reader-threads") as cluster:
        version = cluster.save({f"w{i:03}": torch.full((100,), i) for i in range(500)}, step=1)
    reader = version.reader(threads=2)
    found = reader.whole(chunk for rows in version.chunks.values() for chunk in rows)
    runs = [Run(run.key, piece.chunk.start, piece.chunk.coding.size, (piece,)) for run in found for piece in run.pieces]
    calls, read = itertools.count(), MemoryStore.get_range

    def first_fails(store: MemoryStore, key: str, start: int, length: int) -> object:
        if next(calls) == 0:
            raise StoreUnavailable("planted", subject=key)
        return read(store, key, start, length)

    monkeypatch.setattr(MemoryStore, "get_range", first_fails)
    with pytest.raises(StoreUnavailable, match="planted"):
        reader.complete(runs)
    assert next(calls) < len(runs) == 500
