"""Megatron-Core under Ray Train on CPU workers: killed workers and nodes, and groups of another size."""

from __future__ import annotations

import hashlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.polling import wait_until

import raystow
from integration.example_runs import run_example
from integration.megatron_ranks import Layout, Training, whole
from integration.ray_train_runs import DEADLINE, SPARE, Run, Spares, kill, trainer

pytest.importorskip("megatron.core", reason="make test-frameworks installs Megatron-Core in an environment of its own")

EXAMPLE = "ray_train_megatron.py"


@pytest.mark.slow
def test_killed_workers_resume_and_another_layout_continues(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, sys.path))
    printed = run_example(EXAMPLE, "killed", 60, 2, 1, cwd=tmp_path, kill_a_worker=str(tmp_path / "killed"), PYTHONPATH=path)
    assert "ended at step 60" in printed
    assert "began at step 1," not in printed, "the workers began anew"
    undisturbed = run_example(EXAMPLE, "whole", 60, 2, 1, cwd=tmp_path, PYTHONPATH=path)
    assert printed.rpartition("loss")[2] == undisturbed.rpartition("loss")[2]
    saved, expected = (raystow.latest(str(tmp_path / name)) for name in ("killed", "whole"))
    assert saved is not None
    assert expected is not None
    names = [name for name in expected.tensors() if name != "common_state"]
    assert all((saved.read(name) == expected.read(name)).all() for name in names)
    assert "began at step 61, ended at step 62" in run_example(EXAMPLE, "killed", 62, 2, 2, cwd=tmp_path, PYTHONPATH=path)


def train(config: dict[str, Any]) -> None:
    """Train with all workers as one tensor parallel group, until the note ``end``. Notes name the digest of each saved and
    each loaded state."""
    import ray

    import raystow.megatron

    run, world = Run(Path(config["folder"])), dist.get_world_size()
    training = Training(Layout(tp=world), seed=world)
    with raystow.Checkpointer(config["uri"]) as checkpointer:

        def note(kind: str) -> None:
            every: list[Any] = [None] * world
            dist.all_gather_object(every, training.parts())
            digest = hash_of(whole(every))
            if dist.get_rank() == world - 1:
                node = ray.get_runtime_context().get_node_id()
                run.note(f"{kind}-{training.step_number}-{world}-{node}-{digest}")

        loaded = raystow.megatron.load(checkpointer, training.state(is_loading=True, rng=False))
        if loaded is not None:
            training.take(loaded)
        note("start")
        ended = torch.zeros(1)
        while not ended.any():
            training.train(1, before=checkpointer.fence)
            note("step")
            raystow.megatron.save(checkpointer, training.state(rng=False), step=training.step_number).result(DEADLINE)
            ended.fill_(run.has("end"))
            dist.all_reduce(ended)  # all ranks train the same steps


def hash_of(digests: dict[str, str]) -> str:
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:16]


@pytest.mark.long
def test_a_group_without_its_killed_node_loads_every_bit(spares: Spares, tmp_path: Path) -> None:
    """Two workers, then one that is alone, then two: TP2, TP1 and TP2."""
    run = Run(tmp_path)
    config = {"uri": str(tmp_path / "run")}
    with ThreadPoolExecutor(1) as pool:
        fit = pool.submit(trainer(tmp_path, config, workers=(1, 2), on=SPARE, function=train).fit)
        wait_until(lambda: run.reached() >= 3, "three steps", 300)
        kill(spares.cluster, spares.of(run.starts()[-1][2]))
        wait_until(lambda: len(run.starts()) == 2 and run.reached() > run.starts()[-1][0] + 2, "one worker alone", 300)
        spares.add()
        wait_until(lambda: len(run.starts()) == 3 and run.reached() > run.starts()[-1][0] + 2, "two workers", 300)
        run.note("end")
        fit.result(300)
    assert [world for _, world, _ in run.starts()] == [2, 1, 2]
    trained = {tuple(path.name.split("-")[1::3]) for path in run.folder.glob("step-*")}
    loaded = {tuple(path.name.split("-")[1::3]) for path in run.folder.glob("start-*")}
    assert {(step, digest) for step, digest in loaded if step != "0"} <= trained
    assert len({step for step, _ in loaded}) == 3
