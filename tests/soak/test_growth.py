"""Descriptors, threads, memory and shared memory do not grow over thousands of saves."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers import growth
from helpers.local_cluster import LocalCluster

from raystow.orchestrator.coordinator.housekeeping import Housekeeping
from raystow.storage.retention.policy import Policy


def course_of(folder: Path, saves: int) -> growth.Course:
    """Save with retention in this process, and return the samples of its resources."""
    course: growth.Course = {}
    rng = np.random.default_rng(0)
    odd = np.array([-0.0, np.nan, 0.0]).view(np.uint64) | np.array([0, 0xABCDE, 0], np.uint64)  # a NaN with a payload
    state = {"w": rng.standard_normal(50_000), "b": rng.standard_normal(100), "odd": odd.view(np.float64)}
    gc.freeze()  # otherwise each sample would scan objects of other tests
    with LocalCluster(str(folder), memory=32 << 20) as cluster:
        housekeeping = Housekeeping(cluster.committer, grace=0.0)
        for step in range(saves):
            state["w"][step % 1000 :: 1000] += 1
            version = cluster.save_all([{**state, "step": step}] * 2, step=step)
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
