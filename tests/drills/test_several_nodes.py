"""Two of three nodes are killed during a save, while requests to the store fail; each part has one copy in memory."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from s3_faults.faults import Fault
from s3_faults.proxy import FaultProxy

import raystow
from drills.drill_cluster import DrillCluster, send
from drills.drill_report import Drill, Stopwatch, source
from drills.training import Training

pytestmark = pytest.mark.slow

FOR_EVER = 1_000_000
PACKS = r"\.pack"


@pytest.mark.parametrize(
    ("storing", "reading"),
    [
        (Fault.SLOW_DOWN, Fault.RESET_ANSWER),
    ],
    ids=lambda fault: fault.name,
)
def test_two_of_three_nodes_die_under_faults_of_the_store(
    line: FaultProxy,
    cluster: DrillCluster,
    s3_uri: str,
    tmp_path: Path,
    report: Callable[[Drill], None],
    storing: Fault,
    reading: Fault,
) -> None:
    training = Training(cluster, tmp_path, replication=raystow.Replication(replicas=1))
    training.uri = s3_uri
    cluster.add("a", "b", "c")
    training.start("a", "b", "c")
    training.rehearse(4, 6, 8)
    version = training.save_at(4)
    cluster.copied(training.uri)
    training.each("train", 6)
    rule = line.inject(storing, "PUT|POST", PACKS, times=FOR_EVER)
    training.each("save")
    assert rule.struck.wait(60)
    doomed, watch = ("b", cluster.partner("b")), Stopwatch()
    send(signal.SIGKILL, *[process for name in doomed for process in cluster.processes(name)])
    for name in doomed:
        cluster.kill(name)
    training.end()
    line.heal()
    line.inject(reading, "GET", PACKS, times=3)
    cluster.add("d", "e")
    training.start(*cluster.nodes)
    step, read, _ = training.restore()
    assert step in (4, 6), "the save in progress is restored, or the one before"
    training.each("check", 3)
    training.each("train", step + 1)
    restored_from = source(version, read) if step == 4 else "that save, memory of the others"
    died = f"node and its peer in a save, store {storing.name}"
    report(Drill(died, 0.0, restored_from, watch.seconds(), 6 - step, read))
    line.heal()
    training.goes_on(8)
