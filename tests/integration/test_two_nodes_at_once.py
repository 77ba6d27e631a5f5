"""The node workers of two nodes die at once. The drills kill whole nodes in the same way while the store fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import ray
import torch
from helpers.builders import layers

import raystow
from integration.ranks import Rank, every, save_state, start

pytestmark = pytest.mark.usefixtures("cluster")

SIZE = 500_000


def outcome(self: Rank) -> int:
    """Return the step of the version, or 0 if the save failed."""
    try:
        return self.result(90).step
    except raystow.SaveFailed:
        return 0


@pytest.mark.long
def test_a_save_survives_the_death_of_both_node_workers(tmp_path: Path) -> None:
    """The save succeeds or fails on both ranks alike, the restored bits are correct, and the next save works."""
    ranks = start(str(tmp_path), 2, replication=raystow.Replication(replicas=1))
    save_state(ranks, 1, layers, SIZE)
    pids = [pid for found in every(ranks, "node_worker_pids") for pid in found]
    every(ranks, "set", layers, 2, SIZE)
    every(ranks, "save", 2)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    (step,) = set(ray.get([rank.do.remote(outcome) for rank in ranks], timeout=120))
    every(ranks, "set", layers, -1, SIZE)
    (restored,) = {version.step for version in every(ranks, "restore")}
    assert restored == (step or 1)
    for got in ray.get([rank.do.remote(lambda self: self.state) for rank in ranks], timeout=60):
        assert all(torch.equal(got[name], tensor) for name, tensor in layers(restored, SIZE).items())
    save_state(ranks, 3, layers, SIZE)
    assert raystow.open(tmp_path).latest().step == 3  # type: ignore[union-attr]
