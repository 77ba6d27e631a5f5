"""Restores from the memory of the node that saved, and of other nodes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from helpers.builders import layers

import raystow
from integration.ranks import every, save_state, start

SIZE = 500_000
"""Elements in each layer."""

pytestmark = pytest.mark.usefixtures("cluster")


def check_restored(ranks: list[Any], seed: int) -> None:
    every(ranks, "set", layers, -1, SIZE)
    assert {version.step for version in every(ranks, "restore")} == {seed}
    for got in ray.get([rank.do.remote(lambda self: self.state) for rank in ranks], timeout=60):
        assert all(torch.equal(got[name], tensor) for name, tensor in layers(seed, SIZE).items())


def lose_all_objects(folder: Path) -> None:
    """Delete all objects except marker and root, so that later restores cannot read the store."""
    shutil.rmtree(folder / "versions")


def test_a_restarted_process_restores_from_its_node(tmp_path: Path) -> None:
    (rank,) = start(str(tmp_path), 1)
    for seed in (1, 2):
        save_state([rank], seed, layers, SIZE)
    ray.kill(rank)
    lose_all_objects(tmp_path)
    (rank,) = start(str(tmp_path), 1)
    check_restored([rank], 2)


def near(seed: int) -> dict[str, Any]:
    """Return a state close to that of every other seed, so that saves become deltas."""
    return {name: tensor.view(torch.int32).add(seed).view(torch.float32) for name, tensor in layers(0, SIZE).items()}


def test_a_delta_and_its_base_are_restored_from_memory(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2, compression=raystow.Compression(delta=2))
    for seed in (1, 2):
        every(ranks, "set", near, seed)
        every(ranks, "save", seed)
        every(ranks, "result")
    assert [entry.bases for entry in raystow.open(tmp_path).root().versions] == [(), (1,)]
    lose_all_objects(tmp_path)
    every(ranks, "set", near, -1)
    assert {version.step for version in every(ranks, "restore")} == {2}
    for got in ray.get([rank.do.remote(lambda self: self.state) for rank in ranks], timeout=60):
        assert all(torch.equal(got[name], tensor) for name, tensor in near(2).items())


def test_another_node_restores_from_the_memory_of_the_savers(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2)
    save_state(ranks, 3, layers, SIZE)
    for rank in ranks:
        ray.kill(rank)
    lose_all_objects(tmp_path)
    ranks = start(str(tmp_path), 2, nodes=("node_b",))
    check_restored(ranks, 3)


def test_parts_missing_in_memory_are_read_from_the_store(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2, memory=raystow.Memory(cache=0))
    save_state(ranks, 4, layers, SIZE)
    check_restored(ranks, 4)
    save_state(ranks, 5, layers, SIZE)
    before, newest = raystow.open(tmp_path).versions()
    (restored,) = newest.record.restores
    assert (restored.version, restored.step, restored.ranks) == (before.id, 4, 2)
    assert "memory" not in restored.read
    assert sum(restored.read.values()) >= before.bytes
    lose_all_objects(tmp_path)
    with pytest.raises(raystow.Damaged):
        every(ranks, "restore")
