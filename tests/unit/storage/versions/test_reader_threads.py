"""Reading on several threads: an error in one of them ends the others, and each has one memory for stored bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from helpers.local_cluster import LocalCluster
from helpers.scripted_store import ScriptedStore, script

from raystow.storage.errors import StoreUnavailable
from raystow.storage.versions.reader import Request
from raystow.storage.versions.runs import ByteRun


def test_an_error_ends_the_other_threads() -> None:
    with LocalCluster(ScriptedStore.named("reader-threads").uri) as cluster:
        version = cluster.save({f"w{i:03}": torch.full((100,), i) for i in range(500)}, step=1)
    reader = version.reader(threads=2)
    found = reader.whole(chunk for rows in version.chunks.values() for chunk in rows)
    runs = [ByteRun(run.key, piece.chunk.start, piece.chunk.coding.size, (piece,)) for run in found for piece in run.pieces]
    calls, read = itertools.count(), version.store.get_range

    def first_fails(key: str, start: int, length: int) -> object:
        if next(calls) == 0:
            raise StoreUnavailable("planted", subject=key)
        return read(key, start, length)

    script(version.store, get_range=first_fails)
    with pytest.raises(StoreUnavailable, match="planted"):
        reader.complete(runs)
    assert next(calls) < len(runs) == 500


def test_a_thread_reads_all_runs_into_the_same_memory() -> None:
    state = {f"w{i}": torch.full((1000 * (i + 1),), float(i)) for i in range(8)}
    with LocalCluster(ScriptedStore.named("reader-memory").uri) as cluster:
        version = cluster.save(state, step=1)
    targets = {name: np.zeros(one.shape, np.float32) for name, one in state.items()}
    reader = version.reader(threads=1)
    found = reader.runs(
        Request(name, version.chunks[name], ((0,), one.shape), one.view(np.uint32)) for name, one in targets.items()
    )
    runs = [ByteRun(run.key, piece.chunk.start, piece.chunk.coding.size, (piece,)) for run in found for piece in run.pieces]
    read, places = version.store.get_range_into, set[int]()

    def noted(key: str, start: int, target: memoryview) -> None:
        places.add(np.frombuffer(target, np.uint8).ctypes.data)
        read(key, start, target)

    script(version.store, get_range_into=noted)
    reader.complete(runs)
    assert len(runs) == 8
    assert len(places) == 1
    assert all(np.array_equal(one, state[name].numpy()) for name, one in targets.items())
