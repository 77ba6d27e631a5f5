"""Frozen processes: a node that is replaced and later wakes with outdated saves, and the coordinator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
import torch
from helpers.polling import wait_until
from ray.exceptions import RayError

import raystow
from drills.drill_cluster import DEADLINE, DrillCluster, alive, frozen, wake
from drills.drill_report import Drill, Stopwatch
from drills.training import Rank, Training
from raystow.storage.runtime.clock import SYSTEM

pytestmark = pytest.mark.slow

HEALTH = {"initial_delay_ms": 0, "period_ms": 1000, "timeout_ms": 2000, "failure_threshold": 3}
"""Ray declares a frozen node dead after about 9 s, instead of a minute."""


@pytest.fixture(autouse=True)
def quick_health_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in HEALTH.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", str(value))


def save_forever(rank: Rank, folder: Path) -> None:
    """Train and save at every step. Rank 1 also saves once more when it is woken, in any state of the other ranks."""

    def save_once_more() -> None:
        wait_until((folder / "woken").exists, "the test wakes this rank", 10 * DEADLINE)
        try:
            outcome = f"version {rank.checkpointer.save({'stale': torch.ones(1000)}, step=10_000).result(60).id}"
        except raystow.RaystowError as error:
            outcome = str(error)
        (folder / "writing").write_text(outcome)
        (folder / "writing").rename(folder / "said")

    if rank.rank == 1:
        threading.Thread(target=save_once_more, daemon=True).start()
    while True:
        rank.train(rank.step + 1)
        rank.save()


def test_a_frozen_node_that_was_replaced_cannot_save(
    cluster: DrillCluster, training: Training, tmp_path: Path, report: Callable[[Drill], None]
) -> None:
    cluster.add("a", "b", "c")
    training.start("a", "b")
    training.rehearse(*range(2, 30))
    training.save_at(2)
    cluster.copied(training.uri)
    running = [rank.do.remote(save_forever, tmp_path) for rank in training.ranks]
    wait_until(lambda: max(training.steps()) >= 4, "the ranks save at every step")  # so that the node is frozen during saves
    ours = [*cluster.actors("b", "Rank"), cluster.node_worker("b")]
    watch = Stopwatch()
    stopped = cluster.freeze("b")
    (first,), _ = ray.wait(running, num_returns=1, timeout=60)
    with pytest.raises(RayError):
        ray.get(first, timeout=10)
    detected, reached = watch.seconds(), max(training.steps())
    training.end()

    training.start("a", "c")
    step, read, _ = training.restore()
    training.each("check", 2)
    training.each("train", step + 1)
    report(Drill("node, frozen and later woken", detected, "memory of the others", watch.seconds(), reached - step, read))
    assert not read["store"]
    training.save_at(step + 2)
    before = raystow.open(training.uri).versions()

    wake(*stopped)
    (tmp_path / "woken").touch()
    wait_until((tmp_path / "said").exists, "the woken rank has tried to save")
    assert "has taken up this rank after process" in (tmp_path / "said").read_text()
    node = cluster.nodes.pop("b")

    def ours_have_ended() -> bool:
        node.live_processes()  # reaps the raylet: Ray's workers consider a zombie alive
        return not any(map(alive, ours))

    wait_until(ours_have_ended, "the processes of the woken node end")
    cluster.cluster.remove_node(node, allow_graceful=False)
    after = raystow.open(training.uri)
    assert after.versions() == before
    for version in before:
        after.verify(version)
    training.goes_on(step + 4)
    assert raystow.open(training.uri).versions()[:-1] == before


def test_a_save_waits_for_a_frozen_coordinator(
    cluster: DrillCluster, training: Training, report: Callable[[Drill], None]
) -> None:
    cluster.add("a", "b")
    training.start("a", "b")
    training.rehearse(4, 6, 8)
    training.save_at(2)
    training.each("train", 4)
    with frozen(cluster.coordinator()):
        watch = Stopwatch()
        training.each("save")
        training.each("fence")
        training.each("train", 6)  # a wait for the coordinator would fail: it is frozen until training is done
        training.each("check", 2)
        SYSTEM.sleep(max(0.0, 10 - watch.seconds()))  # freezes the coordinator for 10 s
    (version,) = set(training.each("result"))
    report(Drill("coordinator, frozen for 10 s in a save", 0, "nothing to restore; the save became durable", watch.seconds()))
    assert raystow.open(training.uri).version(version).step == 4
    training.goes_on(8)


def test_a_frozen_coordinator_fails_saves_until_it_is_killed(
    cluster: DrillCluster, training: Training, report: Callable[[Drill], None]
) -> None:
    """The errors name the coordinator."""
    cluster.add("a", "b")
    training.start("a", "b")
    training.rehearse(6, 8, 10)
    training.save_at(2)
    training.each("train", 4)
    coordinator, watch = cluster.coordinator(), Stopwatch()
    with frozen(coordinator):
        training.each("save")
        training.each("train", 6)
        training.each("check", 2)
        failures = training.each("failure")
        detected = watch.seconds()
        coordinator.kill()
    for failure in failures:
        assert "coordinator" in failure
        assert "did not answer within 60 s" in failure
        assert "kill it" in failure
    training.save_at(8)
    what = "nothing to restore; the save failed"
    report(Drill("coordinator, frozen for good and killed", detected, what, watch.seconds()))
    training.each("check", 2)
    training.goes_on(10)
