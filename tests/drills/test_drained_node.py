"""``raystow drain`` in a pod's preStop hook: Ray Train's workers save, the command waits, and training continues on other
nodes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from helpers.polling import wait_until

import raystow
from drills.drill_cluster import DEADLINE, DrillCluster
from raystow.workers.node.actor import saves_on

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train_on_kuberay.py"


def drain(cluster: DrillCluster, node: str, within: str) -> tuple[int, dict[str, Any]]:
    """Run ``raystow drain``; return its exit code and its output. Each raylet is a node of this machine, so the node is named."""
    command = [sys.executable, "-m", "raystow", "drain", "--node", node, "--within", within, "--json"]
    done = subprocess.run(
        command, env={**os.environ, "RAY_ADDRESS": cluster.cluster.address}, capture_output=True, text=True, timeout=DEADLINE
    )
    return done.returncode, json.loads(done.stdout)


@contextlib.contextmanager
def example(cluster: DrillCluster, uri: str) -> Iterator[None]:
    """Run the job of ``k8s/`` on CPUs until the end of the block."""
    command = [sys.executable, str(EXAMPLE), uri, "1000000", "2", "--cpu"]
    job = subprocess.Popen(command, env={**os.environ, "RAY_ADDRESS": cluster.cluster.address}, stderr=subprocess.DEVNULL)
    try:
        yield
        assert job.poll() is None, "the job ended by itself"
    finally:
        job.kill()
        job.wait()


def test_drain_returns_after_the_save_and_the_job_moves(cluster: DrillCluster, tmp_path: Path) -> None:
    uri = f"file://{tmp_path / 'run'}"

    def newest() -> int:
        """Return the step of the newest version, or 0."""
        try:
            version = raystow.open(uri).latest()
        except raystow.NotARepository:
            return 0
        return version.step if version is not None else 0

    def trains(name: str) -> bool:
        return bool(saves_on(cluster.nodes[name].node_id))

    cluster.add("a", "b", "c")
    with example(cluster, uri):
        wait_until(
            lambda: newest() > 0 and sum(map(trains, cluster.nodes)) == 2, "the job trains on two nodes and saves", 3 * DEADLINE
        )
        leaving, spare = next(filter(trains, cluster.nodes)), next(name for name in cluster.nodes if not trains(name))
        node = cluster.nodes[leaving].node_id

        assert drain(cluster, node, "60s") == (0, {"node": node, "durable": [uri], "left": []})
        saved = newest()
        assert saved > 0

        cluster.kill(leaving)
        wait_until(lambda: trains(spare) and newest() > saved, "the job continues and saves", 3 * DEADLINE)
    steps = [version.step for version in raystow.open(uri).versions()]
    assert steps == sorted(set(steps)), "saved steps were trained again"


def test_drain_of_an_idle_node_returns_and_of_a_dead_one_fails(cluster: DrillCluster) -> None:
    cluster.add("a")
    node = cluster.nodes["a"].node_id
    assert drain(cluster, node, "60s") == (0, {"node": node, "durable": [], "left": []})

    cluster.kill("a")
    wait_until(lambda: not next(known for known in ray.nodes() if known["NodeID"] == node)["Alive"], "Ray declares the node dead")
    code, output = drain(cluster, node, "60s")
    assert code == 1
    assert output["error"]["what"] == "no such node is alive"
    assert output["error"]["subject"] == f"node {node}"
