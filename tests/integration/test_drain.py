"""Ranks save on a preemption notice, and ``drain`` waits for it. ``tests/drills`` tests this with Ray Train."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray
import torch
from ray.cluster_utils import Cluster

import raystow
from integration.ranks import Rank, every, start
from raystow.orchestrator.coordinator.drain import Drained, drain
from raystow.orchestrator.ray_cluster import announce_end
from raystow.storage.runtime.clock import SYSTEM
from raystow.workers.node.actor import saves_on
from raystow.workers.ray_connection import RayConnection


def save_when_due(self: Rank, first: int) -> int:
    """Take steps until one is due, and save it; return it."""
    step = first
    while not self.checkpointer.due(step):
        SYSTEM.sleep(0.002 * (self.checkpointer.rank + 1))  # ranks run at different rates
        step += 1
    self.save(step)
    return step


def test_all_ranks_save_when_a_node_will_be_removed(cluster: Cluster, tmp_path: Path) -> None:
    """Only because of the notice, of the same step, and the drain waits for it."""
    leaving = cluster.add_node(num_cpus=1, resources={"leaving": 100}, include_log_monitor=False)
    try:
        ranks = start(str(tmp_path), 2, nodes=("node_a", "leaving"), interval=raystow.Interval(steps=10**9))
        every(ranks, "set", dict, {"w": torch.ones(1000)})
        every(ranks, "save", 1)
        every(ranks, "result")
        saving = [rank.do.remote(save_when_due, 2) for rank in ranks]
        with ThreadPoolExecutor(1) as hook:
            done = hook.submit(
                drain,
                lambda: saves_on(leaving.node_id),
                lambda: announce_end(RayConnection.here(), leaving.node_id, 60, "a test"),
                SYSTEM,
                seconds=60,
            )
            assert done.result(90) == Drained(durable=(raystow.open(tmp_path).uri,), left=())
        (step,) = set(ray.get(saving, timeout=30))
        newest = raystow.open(tmp_path).latest()
        assert newest is not None
        assert newest.step == step
    finally:
        cluster.remove_node(leaving)
