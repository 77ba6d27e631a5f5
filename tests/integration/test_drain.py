"""``drain`` waits for the saves that ranks start on a preemption notice. ``tests/drills`` tests this with Ray Train."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray
import torch
from polling import wait_until
from ranks import Rank, every, start
from ray.cluster_utils import Cluster

import raystow
from raystow.orchestrator.coordinator.drain import Drained, drain
from raystow.orchestrator.ray_cluster import announce_end
from raystow.storage.clock import SYSTEM
from raystow.workers.node.actor import saves_on
from raystow.workers.ray_connection import RayConnection


def save_on_notice(rank: Rank, node: str) -> None:
    """Wait until Ray reports that this node is draining, and save, as a training loop does."""
    wait_until(lambda: node in ray._private.state.state.get_draining_nodes(), "Ray reports that the node is draining")
    rank.save(2)


def test_drain_waits_for_saves_started_on_notice(cluster: Cluster, tmp_path: Path) -> None:
    leaving = cluster.add_node(num_cpus=1, resources={"leaving": 100}, include_log_monitor=False)
    try:
        (rank,) = start(str(tmp_path), 1, nodes=("leaving",))
        every([rank], "set", dict, {"w": torch.ones(1000)})
        every([rank], "save", 1)
        every([rank], "result")
        saving = rank.do.remote(save_on_notice, leaving.node_id)
        with ThreadPoolExecutor(1) as hook:
            done = hook.submit(
                drain,
                lambda: saves_on(leaving.node_id),
                lambda: announce_end(RayConnection.here(), leaving.node_id, 60, "a test"),
                SYSTEM,
                seconds=60,
            )
            assert done.result(90) == Drained(durable=(raystow.open(tmp_path).uri,), left=())
        newest = raystow.open(tmp_path).latest()
        assert newest is not None
        assert newest.step == 2
        ray.get(saving, timeout=30)
    finally:
        cluster.remove_node(leaving)
