"""The progress of a trainer as an object of each rank: any structure, on the same and on other numbers of ranks."""

from __future__ import annotations

from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.local_cluster import LocalCluster

import raystow
from raystow.integrations.training_progress import TrainingProgress
from raystow.storage.errors import StateError


def progress_of(rank: int) -> dict[str, Any]:
    """The progress of a rank; its containers are of any type."""
    return {"at": rank, "seen": Counter({0: rank, (1, 2): 3}), "last": deque([torch.tensor([rank])], 2)}


@pytest.fixture
def version(tmp_path: Path) -> raystow.Version:
    """Saved by two ranks."""
    states = [{"trainer": raystow.PerRank(TrainingProgress(progress_of(rank)))} for rank in range(2)]
    with LocalCluster(str(tmp_path)) as cluster:
        return cluster.save_all(states, step=5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_rank_has_the_progress_of_one(
    version: raystow.Version, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, world_size: int
) -> None:
    """Of its own number, or else of rank 0."""
    for rank in range(world_size):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        progress = TrainingProgress()
        raystow.restore(version, {"trainer": raystow.PerRank(progress)})
        assert repr(progress.value) == repr(progress_of(rank if rank < 2 else 0))
    said = [record.getMessage() for record in caplog.records]
    assert [f"{world_size} ranks restore what 2 ranks have saved" in text for text in said] == [True] * (world_size != 2)


def test_something_else_than_a_progress_is_refused(tmp_path: Path) -> None:
    with LocalCluster(str(tmp_path)) as cluster:
        version = cluster.save({"trainer": "of an earlier release"}, step=1)
    with pytest.raises(StateError, match="trainer: the version has no progress of a training here"):
        raystow.restore(version, {"trainer": raystow.PerRank(TrainingProgress())})
