"""Nodes of an FSDP2 run with a journal are killed at random instants: one step is repeated at most, and the weights end in the
bits of a run that was not disturbed. ``KILLS=20`` kills more often."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from polling import wait_until
from ray.cluster_utils import Cluster
from ray_train_runs import kill

import raystow
from raystow.storage.clock import SYSTEM

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("KILLS", "2"))
APART = 12  # steps from one kill to the next, and some more
SPARE = "journaled"


def train(config: dict[str, Any]) -> None:
    """Train with FSDP2 to ``steps``; save every 50 steps and at the end. Lines of the log tell what rank 0 has done."""
    import ray.train
    import torch
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    torch.manual_seed(0)
    world = ray.train.get_context().get_world_size()
    model = nn.Sequential(nn.Linear(65, 129), nn.ReLU(), nn.Linear(129, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)

    def state(step: int) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optim": moments, "scheduler": scheduler.state_dict(), "step": step}

    with raystow.ray_train.Checkpointer(timeout=60) as checkpointer:
        checkpointer.guard(optimizer)
        journal, restored = checkpointer.journal(model, optimizer), state(0)
        if checkpointer.restore_latest(into=restored):
            set_state_dict(model, optimizer, model_state_dict=restored["model"], optim_state_dict=restored["optim"])
        values = journal.replay() or restored
        scheduler.load_state_dict(values["scheduler"])
        node = ray.get_runtime_context().get_node_id()
        log(config, checkpointer.rank, f"start {values['step']} {node}")
        for step in range(values["step"] + 1, config["steps"] + 1):
            generator = torch.Generator().manual_seed(1000 * step + checkpointer.rank)
            optimizer.zero_grad()
            model(torch.randn(8, 65, generator=generator)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            SYSTEM.sleep(config["pace"])  # stands for the time that a real step takes
            journal.record(step, values={"scheduler": scheduler.state_dict(), "step": step})
            log(config, checkpointer.rank, f"step {step}")
            if step % 50 == 0:
                checkpointer.save(state(step), step=step)
        checkpointer.save(state(config["steps"]), step=config["steps"])


def log(config: dict[str, Any], rank: int, line: str) -> None:
    with open(Path(config["folder"]) / f"rank-{rank}.log", "a") as file:
        file.write(line + "\n")


def lines(folder: Path, rank: int, kind: str) -> list[list[str]]:
    path = folder / f"rank-{rank}.log"
    text = path.read_text() if path.exists() else ""
    return [words for line in text.splitlines() if (words := line.split())[0] == kind]


def reached(folder: Path) -> int:
    """The step that all ranks have ended last."""
    return min((int(found[-1][1]) if (found := lines(folder, rank, "step")) else 0) for rank in (0, 1))


def starts(folder: Path) -> int:
    """How often all ranks have started."""
    return min(len(lines(folder, rank, "start")) for rank in (0, 1))


def trainer(folder: Path, steps: int, pace: float) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    folder.mkdir()
    return TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "steps": steps, "pace": pace},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1.0, SPARE: 1.0}),
        run_config=RunConfig(
            name="run", storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=2 * KILLS + 2)
        ),
    )


@pytest.fixture
def spares(cluster: Cluster) -> Iterator[list[Any]]:
    nodes = [cluster.add_node(num_cpus=1, resources={SPARE: 1}) for _ in range(2)]
    yield nodes
    for node in nodes:
        cluster.remove_node(node, allow_graceful=False)


def test_a_killed_node_costs_one_step_at_most(cluster: Cluster, spares: list[Any], tmp_path: Path) -> None:
    draw, steps = np.random.default_rng(0), APART * (KILLS + 1) + 20
    trainer(tmp_path / "undisturbed", steps, 0.0).fit()
    folder = tmp_path / "disturbed"
    with ThreadPoolExecutor(1) as pool:
        fit = pool.submit(trainer(folder, steps, 0.05).fit)
        for number in range(KILLS):
            spares.append(cluster.add_node(num_cpus=1, resources={SPARE: 1}))
            begin = reached(folder)
            wait_until(lambda begin=begin: fit.done() or reached(folder) >= begin + APART, "steps")  # type: ignore[misc]
            SYSTEM.sleep(float(draw.random()) * 0.1)
            rank = int(draw.integers(2))
            id = lines(folder, rank, "start")[-1][2]
            doomed = next(node for node in spares if node.node_id == id)
            spares.remove(doomed)
            kill(cluster, doomed)
            last = reached(folder)
            wait_until(lambda number=number: starts(folder) == number + 2, "a restart")  # type: ignore[misc]
            (start,) = {int(lines(folder, rank, "start")[-1][1]) for rank in (0, 1)}
            print(f"killed the node of rank {rank} after step {last}: the run went on from step {start}")
            assert start >= last - 1, f"{last - start} steps are lost"
        fit.result(timeout=300)
    ends = [raystow.latest(tmp_path / run / "ray" / "run" / "raystow") for run in ("undisturbed", "disturbed")]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0].step == ends[1].step == steps
    for name in ends[0].tensors():
        assert ends[0].read(name).equal(ends[1].read(name)), name
