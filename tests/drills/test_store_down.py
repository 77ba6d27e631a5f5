"""The store answers every request with 503, for seconds and for a minute, while ranks save and while they restore."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FuturesTimeout
from pathlib import Path

import pytest
from s3_faults.faults import Fault
from s3_faults.proxy import FaultProxy

import raystow
from drills.drill_cluster import DrillCluster
from drills.drill_report import Drill, Stopwatch
from drills.training import Training
from raystow.storage.runtime.clock import SYSTEM

pytestmark = pytest.mark.slow

FOR_EVER = 1_000_000
OUTAGES = [8.0, 60.0]
"""Seconds. Both are longer than the first pauses between retries, which are below one second."""


def start_on_s3(cluster: DrillCluster, folder: Path, uri: str, **options: raystow.Memory) -> Training:
    """Start a training that saves to an S3 server, with a rank on each of two nodes."""
    training = Training(cluster, folder, **options)
    training.uri = uri
    cluster.add("a", "b")
    training.start("a", "b")
    return training


@pytest.mark.parametrize("seconds", OUTAGES)
def test_a_save_waits_for_the_store(
    line: FaultProxy, cluster: DrillCluster, s3_uri: str, tmp_path: Path, report: Callable[[Drill], None], seconds: float
) -> None:
    training = start_on_s3(cluster, tmp_path, s3_uri, timeout=180.0)
    training.rehearse(4, 6, 8)
    training.save_at(2)
    training.each("train", 4)
    watch = Stopwatch()
    line.inject(Fault.SLOW_DOWN, times=FOR_EVER)
    training.each("save")
    training.each("train", 6)  # a wait for the store would fail: it is down until training is done
    training.each("check", 2)
    SYSTEM.sleep(max(0.0, seconds - watch.seconds()))  # lets the outage last ``seconds``
    line.heal()
    (version,) = set(training.each("result", 120.0, timeout=150))
    report(Drill(f"store, {seconds:.0f} s, while saving", 0.0, "nothing to restore; the save became durable", watch.seconds()))
    assert [(v.id, v.step) for v in raystow.open(s3_uri).versions()][1:] == [(version, 4)]
    training.goes_on(8)


def test_memory_restores_a_save_that_failed_in_a_long_outage(
    line: FaultProxy, cluster: DrillCluster, s3_uri: str, tmp_path: Path, report: Callable[[Drill], None]
) -> None:
    training = start_on_s3(cluster, tmp_path, s3_uri, timeout=10.0)
    training.rehearse(4, 8)
    training.save_at(2)
    training.each("train", 4)
    watch = Stopwatch()
    line.inject(Fault.SLOW_DOWN, times=FOR_EVER)
    training.each("save")
    for failure in training.each("failure"):
        assert "could not be stored" in failure
        assert ".pack: the store has not taken it in time" in failure
    detected = watch.seconds()
    cluster.actors("a", "Rank")[0].kill()
    training.end()
    training.start("a", "b")
    step, read, _ = training.restore()
    assert step == 4
    assert set(read) == {"memory"}
    training.each("check", 2)
    training.each("train", 5)
    restored_from = "the save that had failed, memory"
    report(Drill("store, and then a training process", detected, restored_from, watch.seconds(), 0, read))
    line.heal()
    training.goes_on(8)


def test_memory_restores_a_version_while_the_store_is_down(
    line: FaultProxy, cluster: DrillCluster, s3_uri: str, tmp_path: Path, report: Callable[[Drill], None]
) -> None:
    training = start_on_s3(cluster, tmp_path, s3_uri)
    training.rehearse(4, 8)
    training.save_at(4)
    cluster.copied(s3_uri)
    watch = Stopwatch()
    line.inject(Fault.SLOW_DOWN, times=FOR_EVER)
    cluster.kill("b")
    training.end()
    cluster.add("c")
    training.start("a", "c")
    step, read, _ = training.restore()
    assert step == 4
    assert not read["store"]
    training.each("check", 2)
    training.each("train", 5)
    report(Drill("store, and then a node", 0.0, "version 1, memory of the others", watch.seconds(), 0, read))
    line.heal()
    training.goes_on(8)


@pytest.mark.parametrize("seconds", OUTAGES)
def test_a_restore_waits_for_the_store(
    line: FaultProxy, cluster: DrillCluster, s3_uri: str, tmp_path: Path, report: Callable[[Drill], None], seconds: float
) -> None:
    training = start_on_s3(cluster, tmp_path, s3_uri, memory=raystow.Memory(64 << 20, cache=0))
    training.rehearse(4, 8)
    training.save_at(4)
    training.each("train", 6)
    watch = Stopwatch()
    line.inject(Fault.SLOW_DOWN, times=FOR_EVER)
    with ThreadPoolExecutor(1) as pool:
        restoring = pool.submit(training.restore, timeout=seconds + 120)
        with pytest.raises(FuturesTimeout):
            restoring.result(seconds)
        line.heal()
        step, read, _ = restoring.result()
    assert step == 4
    assert read["store"]
    assert not read["memory"]
    training.each("check", 2)
    training.each("train", 5)
    report(Drill(f"store, {seconds:.0f} s, while restoring", 0.0, "version 1, store, when it is back", watch.seconds(), 2, read))
    training.goes_on(8)


def test_a_restore_fails_in_a_long_outage_and_then_works(
    line: FaultProxy, cluster: DrillCluster, s3_uri: str, tmp_path: Path
) -> None:
    training = start_on_s3(cluster, tmp_path, s3_uri, memory=raystow.Memory(64 << 20, cache=0))
    training.rehearse(4, 8)
    training.save_at(4)
    line.inject(Fault.SLOW_DOWN, times=FOR_EVER)
    begun = Stopwatch()
    for message in training.each("do", restoring_fails, timeout=400):
        assert "503" in message or "could not restore" in message
    assert begun.seconds() < 300
    line.heal()
    step, _, _ = training.restore()
    assert step == 4
    training.goes_on(8)


def restoring_fails(rank: object) -> str:
    """Return the message of the error of a restore."""
    try:
        rank.restore()  # type: ignore[attr-defined]
    except (raystow.StoreError, raystow.ClusterError) as error:
        return str(error)
    raise AssertionError("the restore did not fail")
