"""Descriptors, threads, memory and shared memory do not grow over thousands of saves."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from helpers import growth
from helpers.local_cluster import LocalCluster

import raystow
from raystow.orchestrator.coordinator.housekeeping import Housekeeping
from raystow.storage.retention.policy import Policy


def state_of(rank: int) -> dict[str, Any]:
    """Return what both ranks hold, in memory of its own, with ``-0.0`` and NaNs with payloads; shards of different sizes, one of
    them empty; and data of this rank alone."""
    rng = np.random.default_rng(0)
    odd = np.array([-0.0, np.nan, 0.0]).view(np.uint64) | np.array([0, 0xABCDE, 0], np.uint64)
    rows = torch.arange(5.0).view(5, 1)
    return {
        "w": rng.standard_normal(140_000),  # more than all ranks compare in every save
        "b": rng.standard_normal(100),
        "odd": odd.view(np.float64),
        "both": raystow.Box(torch.tensor([-0.0, float("nan"), 1.0]).bfloat16(), (3,), (0,), (0, 1)),
        "uneven": raystow.Box(torch.full((5 - rank, 3), float(rank)), (9, 3), (5 * rank, 0), (rank,)),
        "empty": raystow.Box(rows[: 5 * (1 - rank)], (5, 1), (5 * rank, 0), (rank,)),
        "own": raystow.PerRank({"seed": rank, "noise": torch.full((7,), float(rank))}),
    }


def course_of(folder: Path, saves: int) -> growth.Course:
    """Save with retention in this process, and return the samples of its resources."""
    course: growth.Course = {}
    states = [state_of(rank) for rank in range(2)]
    gc.freeze()  # otherwise each sample would scan objects of other tests
    with LocalCluster(str(folder), memory=32 << 20) as cluster:
        housekeeping = Housekeeping(cluster.committer, grace=0.0)
        for step in range(saves):
            for state in states:
                state["w"][step % 1000 :: 1000] += 1
            version = cluster.save_all([{**state, "step": step} for state in states], step=step)
            assert version.record.differences == (), "two ranks hold the same bits"
            if step % 10 == 9:
                housekeeping.run(Policy(keep_last=3))
            if step % max(1, saves // growth.SAMPLES) == 0:
                gc.collect()
                growth.sample(course, {"": psutil.Process()})
        assert len(cluster.repository.versions()) <= 13
    gc.unfreeze()
    return course


@pytest.mark.slow
def test_resources_do_not_grow_over_thousands_of_saves(tmp_path: Path) -> None:
    course = course_of(tmp_path / "run", growth.SAVES)
    growth.write("growth", course, growth.SAVES, tmp_path)
    growth.check_flat(course)


def test_resources_do_not_grow_over_some_saves(tmp_path: Path) -> None:
    growth.check_flat(course_of(tmp_path / "run", 40))


def test_a_leak_is_detected() -> None:
    with pytest.raises(AssertionError, match="descriptors grows from"):
        growth.check_flat({"descriptors": [float(i) for i in range(40)]})
