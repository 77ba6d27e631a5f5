"""A save in the memory of nodes that cannot become durable is restored, also after the death of a process or a node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from helpers.polling import wait_until
from s3_faults.faults import Fault
from s3_faults.proxy import FaultProxy

import raystow
from drills.drill_cluster import DrillCluster
from drills.drill_report import Drill, Stopwatch
from drills.rank import Rank
from drills.training import Training
from raystow.workers.protocol.messages import Holding

pytestmark = pytest.mark.slow

FOR_EVER = 1_000_000


def restore_committed(rank: Rank) -> int:
    """Restore the newest committed version, and return its step."""
    state: dict[str, Any] = rank.state()
    version = rank.checkpointer.restore_latest(into=state, allow_uncommitted=False)
    assert version is not None
    rank.put(state)
    return version.step


def uncommitted_holdings(cluster: DrillCluster, uri: str) -> list[Holding]:
    """Return the holding of each node for the newest attempt if it is uncommitted."""
    repository = raystow.open(uri)
    newest = [cluster.holdings(name, repository.id)[-1:] for name in cluster.nodes]
    return [one for held in newest for one in held if not one.committed]


def test_a_save_in_memory_survives_a_process_and_a_node(
    line: FaultProxy, cluster: DrillCluster, s3_uri: str, tmp_path: Path, report: Callable[[Drill], None]
) -> None:
    cluster.add("a", "b")
    training = Training(cluster, tmp_path, timeout=300.0)
    training.uri = s3_uri
    training.start("a", "b")
    training.rehearse(2, 4, 6)
    training.save_at(2)
    line.inject(Fault.SLOW_DOWN, "PUT|POST", r"\.pack", times=FOR_EVER)
    training.each("train", 4)
    training.each("save")
    training.each("fence")
    wait_until(
        lambda: [held.whole for held in uncommitted_holdings(cluster, s3_uri)] == [{0, 1}] * 2,
        "a save in the memory of both nodes",
    )

    watch = Stopwatch()
    cluster.actors("b", "Rank")[0].kill()
    training.end()
    training.start("a", "b")
    assert training.each("do", restore_committed) == [2, 2]
    training.each("check", 2)
    step, read, _ = training.restore()
    assert (step, set(read)) == (4, {"memory"})
    training.each("check", 2)
    assert [version.step for version in raystow.open(s3_uri).versions()] == [2]
    report(Drill("training process, a save not durable", 0.0, "that save, memory of its node", watch.seconds(), 0, read))

    watch = Stopwatch()
    cluster.kill("b")
    wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2, "Ray declares the node dead, so the save is given up")
    detected = watch.seconds()
    training.end()
    cluster.add("c")
    training.start("a", "c")
    assert training.each("do", restore_committed) == [2, 2]
    step, read, _ = training.restore()
    assert step == 4
    assert not read["store"]
    training.each("check", 2)
    assert [version.step for version in raystow.open(s3_uri).versions()] == [2]
    report(Drill("node, a save not durable", detected, "that save, memory of the others", watch.seconds(), 0, read))

    line.heal()
    training.goes_on(6)
    assert [version.step for version in raystow.open(s3_uri).versions()] == [2, 6]  # the save of step 4 was given up
    wait_until(lambda: not uncommitted_holdings(cluster, s3_uri), "the new version replaces the save in memory")
