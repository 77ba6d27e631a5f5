"""A rollback during a run: the coordinator detects it, and no rank restores a rolled-back version."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
import torch
from helpers.builders import layers
from helpers.polling import wait_until

import raystow
from integration.ranks import every, save_state, start
from raystow.orchestrator.coordinator.ray_client import coordinator_actor

SIZE = 100_000
"""Elements in each layer."""

pytestmark = pytest.mark.usefixtures("cluster")


def test_a_run_continues_from_the_version_of_a_rollback(tmp_path: Path) -> None:
    """The newer versions are still in the nodes' memory. The next save is whole, because its base was rolled back."""
    ranks = start(str(tmp_path), 2, compression=raystow.Compression(delta=2))
    for seed in (1, 2, 3):
        save_state(ranks, seed, layers, SIZE)
    repository = raystow.open(tmp_path)
    assert [version.id for version in repository.rollback(repository.version(1))] == [2, 3]
    every(ranks, "set", layers, -1, SIZE)
    assert {version.id for version in every(ranks, "restore")} == {1}
    for got in ray.get([rank.do.remote(lambda self: self.state) for rank in ranks], timeout=60):
        assert all(torch.equal(got[name], tensor) for name, tensor in layers(1, SIZE).items())
    save_state(ranks, 4, layers, SIZE)
    root = repository.root()
    assert [entry.step for entry in root.versions] == [1, 4]
    assert [one.entry.step for one in root.rolled_back] == [2, 3]
    every(ranks, "set", layers, -1, SIZE)
    assert {version.step for version in every(ranks, "restore")} == {4}


def test_a_save_started_before_a_rollback_fails(tmp_path: Path) -> None:
    """The coordinator detects the rollback at the commit, and the save is not restored from memory either."""
    first, second = ranks = start(str(tmp_path), 2)
    for seed in (1, 2):
        save_state(ranks, seed, layers, SIZE)
    every(ranks, "set", layers, 3, SIZE)
    ray.get(first.save.remote(3), timeout=60)  # waits for the other rank
    coordinator = coordinator_actor(tmp_path.as_uri())
    wait_until(lambda: ray.get(coordinator.overview.remote(), timeout=60).attempts, "the save has begun")
    repository = raystow.open(tmp_path)
    repository.rollback(repository.version(1))
    ray.get(second.save.remote(3), timeout=60)
    for rank in ranks:
        with pytest.raises(raystow.SaveFailed, match="rolled back since the save began"):
            ray.get(rank.result.remote(), timeout=60)
    every(ranks, "set", layers, -1, SIZE)
    assert {version.id for version in every(ranks, "restore")} == {1}
    save_state(ranks, 4, layers, SIZE)
    assert [version.step for version in repository.versions()] == [1, 4]
