"""Nodes are killed: one, one and its partner, and one without a replacement."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from drills.drill_cluster import DrillCluster, alive
from drills.drill_report import Drill, Stopwatch, source
from drills.rank import wanted
from drills.training import Training

pytestmark = pytest.mark.slow


def test_training_continues_after_a_node_is_killed(
    cluster: DrillCluster, training: Training, report: Callable[[Drill], None]
) -> None:
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


def test_training_continues_after_only_a_raylet_is_killed(
    cluster: DrillCluster, training: Training, report: Callable[[Drill], None]
) -> None:
    cluster.add("a", "b", "c")
    training.start("a", "b", "c")
    training.rehearse(4, 8)
    version = training.save_at(4)
    cluster.copied(training.uri)
    training.go_on(past=6)
    watch = Stopwatch()
    survivors = [process for process in cluster.kill_raylet("b") if alive(process)]
    assert survivors
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
    assert not any(alive(process) for process in survivors)


def test_training_continues_after_a_node_and_its_peer_die(
    cluster: DrillCluster, training: Training, report: Callable[[Drill], None]
) -> None:
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
    assert read["store"], "no other node had the part of b"
    training.each("check", 3)
    training.each("train", step + 1)
    report(Drill("node and its peer", detected, source(version, read), watch.seconds(), reached - step, read))
    training.goes_on(8)


def test_three_ranks_continue_after_the_loss_of_one_of_four(
    cluster: DrillCluster, training: Training, report: Callable[[Drill], None]
) -> None:
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
    training.rehearse(8, since=wanted(training.folder, 4, 4))  # three ranks train from step 4 without raystow
    training.restore()
    training.goes_on(8)
