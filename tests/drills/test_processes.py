"""Single processes are killed: training processes, the coordinator, and node workers during training and during a save.

``make drills`` runs these tests; ``tests/integration/test_save_path.py`` kills the same processes without a training.
"""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest
import ray
from helpers.polling import wait_until

import raystow
from drills.drill_cluster import DrillCluster, frozen
from drills.drill_report import Drill, Stopwatch, source
from drills.training import Training

pytestmark = pytest.mark.slow


def test_training_continues_after_a_process_is_killed(
    cluster: DrillCluster, training: Training, report: Callable[[Drill], None]
) -> None:
    cluster.add("a", "b")
    training.start("a", "b")
    training.rehearse(4, 8)
    version = training.save_at(4)
    training.go_on(past=6)
    watch = Stopwatch()
    training.process(1).kill()
    training.wait_for_failure()
    detected, reached = watch.seconds(), max(training.steps())
    training.end()
    training.start("a", "b")
    step, read, _ = training.restore()
    assert step == 4
    assert read["memory"]
    assert read.keys() == {"memory"}
    training.each("check", 2)
    training.each("train", step + 1)
    lost = reached - step
    report(Drill("training process", detected, source(version, read), watch.seconds(), lost, read))
    training.goes_on(8)


def test_training_continues_after_the_coordinator_is_killed(
    cluster: DrillCluster, training: Training, report: Callable[[Drill], None]
) -> None:
    cluster.add("a", "b")
    training.start("a", "b")
    training.rehearse(8, 10)
    training.save_at(4)
    epoch = raystow.open(training.uri).root().epoch
    training.each("train", 6)
    with frozen(cluster.node_worker("b")):  # prevents the save from completing
        training.each("save")
        ray.get(training.ranks[0].fence.remote(), timeout=60)
        watch, coordinator = Stopwatch(), cluster.coordinator()
        coordinator.kill()
    failures = training.each("failure")
    detected = watch.seconds()
    assert any("coordinator" in failure for failure in failures), failures
    training.save_at(8)
    assert raystow.open(training.uri).root().epoch > epoch
    report(Drill("coordinator, in a save", detected, "nothing to restore; the save was given up", watch.seconds()))
    training.each("check", 2)
    training.goes_on(10)


def test_training_continues_after_a_node_worker_is_killed(
    cluster: DrillCluster, training: Training, report: Callable[[Drill], None]
) -> None:
    cluster.add("a", "b")
    training.start("a", "b")
    training.rehearse(8, 10, 12)
    training.save_at(4)
    cluster.copied(training.uri)
    watch = Stopwatch()
    worker = cluster.node_worker("a")
    worker.kill()
    wait_until(lambda: _another(cluster, "a", worker), "another node worker on a")
    detected = watch.seconds()
    training.each("train", 6)
    training.save_at(8)  # by the same training processes
    report(Drill("node worker", detected, "nothing to restore", watch.seconds()))
    training.each("check", 2)
    cluster.copied(training.uri)
    training.goes_on(10)
    training.goes_on(12)


def test_training_restarts_after_a_worker_is_killed_in_a_save(
    cluster: DrillCluster, training: Training, report: Callable[[Drill], None]
) -> None:
    cluster.add("a", "b")
    training.start("a", "b")
    training.rehearse(4, 8)
    version = training.save_at(4)
    cluster.copied(training.uri)
    training.each("train", 6)
    with frozen(cluster.node_worker("b")):  # prevents the save from completing
        training.each("save")
        ray.get(training.ranks[0].fence.remote(), timeout=60)
        watch = Stopwatch()
        cluster.node_worker("a").kill()
        failure = ray.get(training.ranks[0].failure.remote(), timeout=60)
        detected = watch.seconds()
    assert "node worker" in failure
    training.end()
    training.start("a", "b")
    step, read, _ = training.restore()
    assert step == 4
    training.each("check", 2)
    assert not read["store"]  # the other node has the part of the dead worker, and may have sent it to the new worker already
    training.each("train", step + 1)
    drill = "node worker in a save, then training"
    report(Drill(drill, detected, source(version, read), watch.seconds(), 6 - step, read))
    training.goes_on(8)


def _another(cluster: DrillCluster, name: str, former: psutil.Process) -> bool:
    return any(worker != former for worker in cluster.actors(name, "NodeActor"))
