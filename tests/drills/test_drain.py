"""What a pod's preStop hook does: ``raystow drain`` makes Ray Train's workers save and waits; training goes on elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from stage import DEADLINE, Stage, until
from test_preemption import train_in_ray_train

import raystow

pytestmark = pytest.mark.slow


def drain(stage: Stage, node: str, within: str) -> tuple[int, dict[str, Any]]:
    """The exit code of the command, and what it prints. On one machine each raylet is a node, so it has to be named."""
    command = [sys.executable, "-m", "raystow", "drain", "--node", node, "--within", within, "--json"]
    done = subprocess.run(
        command, env={**os.environ, "RAY_ADDRESS": stage.cluster.address}, capture_output=True, text=True, timeout=DEADLINE
    )
    return done.returncode, json.loads(done.stdout)


def test_the_hook_returns_when_training_has_saved(stage: Stage, tmp_path: Path) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def started() -> list[list[str]]:
        return sorted(path.name.split("-")[1::2] for path in tmp_path.glob("from-*"))

    stage.add("a", "b", "c")
    uri = str(tmp_path / "run")
    trainer = TorchTrainer(
        train_in_ray_train,
        train_loop_config={"uri": uri, "folder": str(tmp_path), "last": 80, "seconds": 0.2},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="hook", storage_path=str(tmp_path / "ray"), failure_config=FailureConfig(max_failures=1)),
    )
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(trainer.fit)
        until(lambda: bool(started()), "it trains")
        ((_, node),) = started()

        assert drain(stage, node, "60s") == (0, {"node": node, "durable": [f"file://{uri}"], "left": []})
        first, saved = raystow.open(uri).versions()
        assert saved.step > first.step == 0

        stage.kill(next(name for name, running_on in stage.nodes.items() if running_on.node_id == node))
        running.result(2 * DEADLINE)
    (_, before), (again, after) = sorted(started(), key=lambda told: int(told[0]))
    assert int(again) == saved.step
    assert before != after
    newest = raystow.open(uri).latest()
    assert newest is not None
    assert torch.equal(newest.read("w"), torch.full((1000,), 80.0))


def test_a_node_that_trains_nothing_goes_at_once_and_one_that_is_gone_is_an_error(stage: Stage) -> None:
    stage.add("a")
    node = stage.nodes["a"].node_id
    assert drain(stage, node, "60s") == (0, {"node": node, "durable": [], "left": []})

    stage.kill("a")
    until(lambda: not next(known for known in ray.nodes() if known["NodeID"] == node)["Alive"], "Ray calls it dead")
    code, told = drain(stage, node, "60s")
    assert code == 1
    assert told["error"]["what"] == "no such node is alive"
    assert told["error"]["subject"] == f"node {node}"
