"""Whole nodes die: one, one and its partner, one for good."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from drill_cluster import DrillCluster, alive
from drill_report import Drill, Stopwatch, source
from rank import wanted
from training import Training

pytestmark = pytest.mark.slow


def test_a_node_is_killed(cluster: DrillCluster, training: Training, report: Callable[[Drill], None]) -> None:
    cluster.add("a", "b", "c")
    training.start("a", "b", "c")
    training.rehearse(4, 8)
    version = training.save_at(4)
    cluster.copied(training.uri)
    training.go_on(past=6)
    watch = Stopwatch()
    cluster.kill("b")
    training.wait_for_failure()
    detected, reached = watch.seconds(), max(training.steps())
    training.end()
    cluster.add("d")
    training.start("a", "d", "c")
    step, read, _ = training.restore()
    assert step == 4
    assert read["memory"]
    assert read["peer"]
    assert not read["store"]
    training.each("check", 3)
    training.each("train", step + 1)
    report(Drill("node", detected, source(version, read), watch.seconds(), reached - step, read))
    training.goes_on(8)


def test_a_raylet_is_killed_but_not_the_processes_of_its_node(
    cluster: DrillCluster, training: Training, report: Callable[[Drill], None]
) -> None:
    cluster.add("a", "b", "c")
    training.start("a", "b", "c")
    training.rehearse(4, 8)
    version = training.save_at(4)
    cluster.copied(training.uri)
    training.go_on(past=6)
    watch = Stopwatch()
    undead = [process for process in cluster.kill_raylet("b") if alive(process)]
    assert undead
    training.wait_for_failure()
    detected, reached = watch.seconds(), max(training.steps())
    training.end()
    cluster.add("d")
    training.start("a", "d", "c")
    step, read, _ = training.restore()
    assert step == 4
    assert not read["store"]
    training.each("check", 3)
    training.each("train", step + 1)
    drill = "raylet; its node's processes lived on"
    report(Drill(drill, detected, source(version, read), watch.seconds(), reached - step, read))
    training.goes_on(8)
    assert not any(alive(process) for process in undead)


def test_a_node_and_its_peer_are_killed(cluster: DrillCluster, training: Training, report: Callable[[Drill], None]) -> None:
    cluster.add("a", "b", "c")
    training.start("a", "b", "c")
    training.rehearse(4, 8)
    version = training.save_at(4)
    cluster.copied(training.uri)
    training.go_on(past=6)
    partner, watch = cluster.partner("b"), Stopwatch()
    cluster.kill("b")
    cluster.kill(partner)
    training.wait_for_failure()
    detected, reached = watch.seconds(), max(training.steps())
    training.end()
    cluster.add("d", "e")
    training.start(*cluster.nodes)
    step, read, _ = training.restore()
    assert step == 4
    assert read["memory"]
    assert read["store"], "nobody else had the part of b"
    training.each("check", 3)
    training.each("train", step + 1)
    report(Drill("node and its peer", detected, source(version, read), watch.seconds(), reached - step, read))
    training.goes_on(8)


def test_one_of_four_is_lost_for_good(cluster: DrillCluster, training: Training, report: Callable[[Drill], None]) -> None:
    cluster.add("a", "b", "c", "d")
    training.start("a", "b", "c", "d")
    training.rehearse(4)
    version = training.save_at(4)
    cluster.copied(training.uri)
    training.go_on(past=6)
    watch = Stopwatch()
    cluster.kill("d")
    training.wait_for_failure()
    detected, reached = watch.seconds(), max(training.steps())
    training.end()
    training.start("a", "b", "c")
    step, read, _ = training.restore()
    assert step == 4
    assert read["memory"]
    assert not read["store"]
    training.each("check", 4)
    training.each("train", step + 1)
    report(Drill("one of four nodes, for good", detected, source(version, read), watch.seconds(), reached - step, read))
    training.rehearse(8, since=wanted(training.folder, 4, 4))  # three ranks on from there, without raystow
    training.restore()
    training.goes_on(8)
