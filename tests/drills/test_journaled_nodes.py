"""Nodes of an FSDP2 run with a journal are killed at random instants: each kill repeats at most one step, and the final
weights equal those of an undisturbed run. ``KILLS=2`` is quicker."""

from __future__ import annotations

import json
import os
import statistics
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.polling import wait_until

import raystow
from drills.drill_cluster import DrillCluster
from drills.drill_report import Drill, Stopwatch
from drills.rank import ReadLog
from raystow.storage.runtime.clock import SYSTEM

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("KILLS", "20"))
APART = 12  # minimum number of steps between a restart and the next kill
PACE = 0.05  # seconds of a step
LAST = 60  # steps after the last kill, so that the ranks read the final step before they reach it


def train(config: dict[str, Any]) -> None:
    """Train with FSDP2 up to the step in a file; save every 50 steps and at the end. Log files record starts and steps."""
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

    folder, reads = Path(config["folder"]), ReadLog()
    with raystow.ray_train.Checkpointer(timeout=60, replication=raystow.Replication(replicas=1)) as checkpointer:
        checkpointer.guard(optimizer)
        journal, restored = checkpointer.journal(model, optimizer), state(0)
        if checkpointer.restore_latest(into=restored):
            set_state_dict(model, optimizer, model_state_dict=restored["model"], optim_state_dict=restored["optim"])
        values = journal.replay() or restored
        scheduler.load_state_dict(values["scheduler"])
        node = ray.get_runtime_context().get_node_id()
        log(folder, checkpointer.rank, f"start {values['step']} {node} {json.dumps(reads.read, separators=(',', ':'))}")
        step = values["step"]
        while step != end(folder):
            step += 1
            generator = torch.Generator().manual_seed(1000 * step + checkpointer.rank)
            optimizer.zero_grad()
            model(torch.randn(8, 65, generator=generator)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            SYSTEM.sleep(config["pace"])  # simulates the duration of a real step
            journal.record(step, values={"scheduler": scheduler.state_dict(), "step": step})
            log(folder, checkpointer.rank, f"step {step}")
            if step % 50 == 0:
                checkpointer.save(state(step), step=step)
        checkpointer.save(state(step), step=step)


def end(folder: Path) -> int | None:
    """Return the step that ends the training, or None while it is unknown."""
    path = folder / "end"
    return int(path.read_text()) if path.exists() else None


def set_end(folder: Path, step: int) -> None:
    (folder / "written").write_text(str(step))
    (folder / "written").rename(folder / "end")


def log(folder: Path, rank: int, line: str) -> None:
    with open(folder / f"rank-{rank}.log", "a") as file:
        file.write(line + "\n")


def lines(folder: Path, rank: int, kind: str) -> list[list[str]]:
    path = folder / f"rank-{rank}.log"
    text = path.read_text() if path.exists() else ""
    return [words for line in text.splitlines() if (words := line.split())[0] == kind]


def reached(folder: Path) -> int:
    """Return the last step that all ranks have finished."""
    return min((int(found[-1][1]) if (found := lines(folder, rank, "step")) else 0) for rank in (0, 1))


def starts(folder: Path) -> int:
    """Return the number of starts that all ranks have logged."""
    return min(len(lines(folder, rank, "start")) for rank in (0, 1))


def trainer(folder: Path, pace: float) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    return TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "pace": pace},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1.0}),
        run_config=RunConfig(
            name="run", storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=2 * KILLS + 2)
        ),
    )


def test_a_killed_node_costs_at_most_one_step(cluster: DrillCluster, tmp_path: Path, report: Callable[[Drill], None]) -> None:
    draw, folder = np.random.default_rng(0), tmp_path / "disturbed"
    lost, back, read = list[int](), list[float](), Counter[str]()
    folder.mkdir()
    cluster.add("n0", "n1")
    with ThreadPoolExecutor(1) as pool:
        fit = pool.submit(trainer(folder, PACE).fit)

        def wait(condition: Callable[[], bool], what: str) -> None:
            wait_until(lambda: fit.done() or condition(), what)
            assert not fit.done(), f"the training ended before: {fit.result()}"

        wait(lambda: starts(folder) == 1, "the beginning")
        for number in range(KILLS):
            cluster.add(f"n{number + 2}")
            begin = reached(folder)
            wait(lambda begin=begin: reached(folder) >= begin + APART, "steps")  # type: ignore[misc]
            SYSTEM.sleep(float(draw.random()) * 2 * PACE)
            rank = int(draw.integers(2))
            id = lines(folder, rank, "start")[-1][2]
            watch = Stopwatch()
            cluster.kill(next(name for name, node in cluster.nodes.items() if node.node_id == id))
            last = reached(folder)
            wait(lambda number=number: starts(folder) == number + 2, "a restart")  # type: ignore[misc]
            (start,) = {int(lines(folder, rank, "start")[-1][1]) for rank in (0, 1)}
            wait(lambda start=start: reached(folder) > start, "a step")  # type: ignore[misc]
            print(f"killed the node of rank {rank} after step {last}: the run went on from step {start}")
            assert start >= last - 1, f"{last - start} steps were lost"
            lost.append(max(last - start, 0))
            back.append(watch.seconds())
            for restarted in (0, 1):
                read.update(json.loads(lines(folder, restarted, "start")[-1][3]))
        set_end(folder, steps := reached(folder) + LAST)
        fit.result(timeout=300)
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    set_end(undisturbed, steps)
    trainer(undisturbed, 0.0).fit()
    ends = [raystow.latest(path / "ray" / "run" / "raystow") for path in (undisturbed, folder)]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0].step == ends[1].step == steps
    for name in ends[0].tensors():
        assert ends[0].read(name).equal(ends[1].read(name)), name
    restored = "a version and the recorded steps after it, memory"
    died = f"{KILLS} nodes, one by one, with a step journal"
    each = {source: nbytes // KILLS for source, nbytes in read.items()}
    report(Drill(died, 0.0, restored, statistics.median(back), max(lost), each))
