"""Restoring from the memory of the nodes that saved: of the own node, and of others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ranks import every, start

import raystow

pytestmark = pytest.mark.usefixtures("cluster")


def state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer{i}": torch.randn(500_000, generator=generator) for i in range(4)}


def check_restored(ranks: list[Any], seed: int) -> None:
    every(ranks, "set", state, -1)
    assert {version.step for version in every(ranks, "restore")} == {seed}
    for got in ray.get([rank.do.remote(lambda self: self.state) for rank in ranks], timeout=60):
        assert all(torch.equal(got[name], tensor) for name, tensor in state(seed).items())


def save(folder: Path, ranks: list[Any], seed: int) -> None:
    every(ranks, "set", state, seed)
    every(ranks, "save", seed)
    every(ranks, "result")


def lose_all_objects(folder: Path) -> None:
    """All but marker and root: whoever restores now has not asked the store."""
    shutil.rmtree(folder / "versions")


def test_a_restarted_process_restores_from_its_node_without_the_store(tmp_path: Path) -> None:
    (rank,) = start(str(tmp_path), 1)
    for seed in (1, 2):
        save(tmp_path, [rank], seed)
    ray.kill(rank)
    lose_all_objects(tmp_path)
    (rank,) = start(str(tmp_path), 1)
    check_restored([rank], 2)


def near(seed: int) -> dict[str, Any]:
    """Not far from any other: saves become differences."""
    return {name: tensor.view(torch.int32).add(seed).view(torch.float32) for name, tensor in state(0).items()}


def test_a_difference_is_restored_with_what_it_needs_without_the_store(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2, delta=2)
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


def test_another_node_restores_from_the_memory_of_those_that_saved(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2)
    save(tmp_path, ranks, 3)
    for rank in ranks:
        ray.kill(rank)
    lose_all_objects(tmp_path)
    ranks = start(str(tmp_path), 2, nodes=("node_b",))
    check_restored(ranks, 3)


def test_what_is_not_in_memory_comes_from_the_store(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2, keep_in_memory=0)
    save(tmp_path, ranks, 4)
    check_restored(ranks, 4)
    save(tmp_path, ranks, 5)
    before, newest = raystow.open(tmp_path).versions()
    (restored,) = newest.record.restores
    assert (restored.version, restored.step, restored.ranks) == (before.id, 4, 2)
    assert set(restored.read) <= {"store", "peer"}  # what both nodes want one of them reads, and sends on
    assert sum(restored.read.values()) >= before.bytes
    lose_all_objects(tmp_path)
    with pytest.raises(raystow.Damaged):
        every(ranks, "restore")
