"""A node gets a preemption notice from Ray: training saves in time, and loses no step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from helpers.polling import wait_until

import raystow
from drills.drill_cluster import DEADLINE, DrillCluster
from drills.drill_report import Drill, Stopwatch
from drills.rank import Rank
from drills.training import Training
from raystow.storage.runtime.clock import SYSTEM

pytestmark = pytest.mark.slow

NOTICE = 60.0
"""Seconds between the notice and the end of the node."""
NEVER = raystow.Interval(steps=10**9)


def drain(address: str, node: str) -> None:
    """Drain a node, as on a cloud's preemption notice; ``ray drain-node`` makes the same call."""
    reason = ray.core.generated.autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline = int((SYSTEM.now() + NOTICE) * 1000)
    accepted, why = ray._raylet.GcsClient(address=address).drain_node(node, reason, "spot instance", deadline)
    assert accepted, why


def train_until_notice(rank: Rank) -> int:
    """Train until a save is due because of the notice; return the step when the save is durable."""
    due = False
    while not due:
        rank.train(rank.step + 1)
        due = rank.checkpointer.due(rank.step, NEVER)
    rank.save()
    rank.result()
    return rank.step


def test_a_save_on_notice_is_durable_before_the_node_is_gone(
    cluster: DrillCluster, training: Training, report: Callable[[Drill], None]
) -> None:
    cluster.add("a", "b", "c")
    training.start("a", "b")
    training.rehearse(2)
    training.save_at(2)
    running: list[Any] = [rank.do.remote(train_until_notice) for rank in training.ranks]
    wait_until(lambda: min(training.steps()) >= 4, "the training runs")
    watch = Stopwatch()
    drain(cluster.cluster.address, cluster.nodes["b"].node_id)
    (step,) = set(ray.get(running, timeout=NOTICE))
    detected = watch.seconds()
    newest = raystow.open(training.uri).latest()
    assert newest is not None
    assert newest.step == step > 2
    cluster.copied(training.uri)

    cluster.kill("b")
    watch = Stopwatch()
    training.end()
    training.start("a", "c")
    restored, read, _ = training.restore()
    assert restored == step
    assert not read["store"]
    training.each("train", step + 1)
    restored_from = f"version {newest.id}, saved on notice, memory of the others"
    report(Drill("node, with notice", detected, restored_from, watch.seconds(), 0, read))

    training.each("start_over")
    training.rehearse(step, step + 4)
    training.restore()
    training.each("check", 2)
    training.goes_on(step + 4)


def train_in_ray_train(config: dict[str, Any]) -> None:
    """Count steps, and save because of a notice only."""
    import ray.train

    folder = Path(config["folder"])
    with raystow.Checkpointer(config["uri"], timeout=60.0, interval=NEVER) as checkpointer:
        state = {"w": torch.zeros(1000), "step": 0}
        if checkpointer.restore_latest(into=state) is None:
            checkpointer.save(state, step=0).result(60)  # starts the node worker: a draining node starts none
        if checkpointer.rank == 1:
            (folder / f"from-{state['step']}-on-{ray.get_runtime_context().get_node_id()}").touch()
        while state["step"] < config["last"]:
            checkpointer.fence()
            state["w"] += 1
            state["step"] += 1
            SYSTEM.sleep(config["seconds"])  # simulates the duration of a real step
            if checkpointer.due(state["step"]):
                checkpointer.save(state, step=state["step"]).result(60)
        checkpointer.save(state, step=state["step"]).result(60)
    ray.train.report({})


def test_workers_of_ray_train_save_on_a_notice(cluster: DrillCluster, tmp_path: Path) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def started() -> list[list[str]]:
        return sorted(path.name.split("-")[1::2] for path in tmp_path.glob("from-*"))

    cluster.add("a", "b", "c")
    uri = str(tmp_path / "run")
    trainer = TorchTrainer(
        train_in_ray_train,
        train_loop_config={"uri": uri, "folder": str(tmp_path), "last": 80, "seconds": 0.2},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="drill", storage_path=str(tmp_path / "ray"), failure_config=FailureConfig(max_failures=1)),
    )
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(trainer.fit)
        wait_until(lambda: bool(started()), "the training runs")
        ((_, node),) = started()
        drain(cluster.cluster.address, node)
        wait_until(lambda: len(raystow.open(uri).versions()) == 2, "a save on notice")
        _, version = raystow.open(uri).versions()
        cluster.kill(next(name for name, running_on in cluster.nodes.items() if running_on.node_id == node))
        running.result(2 * DEADLINE)
    (_, first), (again, second) = sorted(started(), key=lambda start: int(start[0]))
    assert int(again) == version.step > 0
    assert first != second
    newest = raystow.open(uri).latest()
    assert newest is not None
    assert newest.step == 80
    assert torch.equal(newest.read("w"), torch.full((1000,), 80.0))
