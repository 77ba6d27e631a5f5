"""The head is lost and restarted with Ray's fault tolerance: its state is in RocksDB, on a disk that survives the head."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import ray
from ray._private import services

import raystow
from drills.drill_cluster import DrillCluster, send
from drills.drill_report import Drill, Stopwatch
from drills.training import Training

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fault_tolerance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Configure Ray as its guide on the fault tolerance of the GCS describes."""
    for name, value in {
        "gcs_storage": "rocksdb",
        "gcs_storage_path": str(tmp_path / "gcs"),
        "health_check_initial_delay_ms": "0",
        "health_check_period_ms": "1000",
        "health_check_timeout_ms": "2000",
        "health_check_failure_threshold": "3",
    }.items():
        monkeypatch.setenv(f"RAY_{name}", value)


def connect_to_node(cluster: DrillCluster, name: str) -> None:
    """Connect this process to a node other than the head; otherwise it would end with the head."""
    ray.shutdown()
    node = cluster.nodes[name].node_id
    with mock.patch.object(services, "find_node_ids", return_value=[node]):  # Ray would select the head on this machine
        ray.init(address=cluster.cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    assert ray.get_runtime_context().get_node_id() == node


def lose_and_restart(cluster: DrillCluster) -> None:
    """Kill all processes of the head, and start a head with the same address."""
    head = cluster.cluster.head_node
    port = int(head.gcs_address.rpartition(":")[2])
    send(signal.SIGKILL, *cluster.processes("head"))
    cluster.cluster.remove_node(head, allow_graceful=False)
    cluster.cluster.add_node(num_cpus=0, include_dashboard=False, object_store_memory=80 << 20, gcs_server_port=port)


def test_training_continues_after_a_restart_of_the_head(
    cluster: DrillCluster, training: Training, report: Callable[[Drill], None]
) -> None:
    cluster.add("a", "b")
    connect_to_node(cluster, "a")
    training.start("a", "b")
    training.rehearse(4, 6, 8, 10)
    training.save_at(4)
    root = raystow.open(training.uri).root()
    lasting = [process for name in ("a", "b") for process in (*cluster.actors(name, "Rank"), cluster.node_worker(name))]
    watch = Stopwatch()
    lose_and_restart(cluster)
    training.each("train", 6)
    training.each("check", 2)
    detected = watch.seconds()
    assert training.save_at(8) > root.versions[-1].id
    assert raystow.open(training.uri).root().epoch > root.epoch
    report(Drill("head, restarted with RocksDB", detected, "nothing to restore", watch.seconds()))
    assert all(process.is_running() for process in lasting)

    cluster.actors("b", "Rank")[0].kill()
    training.end()
    training.start("a", "b")
    step, read, _ = training.restore()
    assert step == 8
    assert set(read) == {"memory"}
    training.each("check", 2)
    training.goes_on(10)
