"""A bit that flips in one rank's replica, in a training by each integration: the next save names ranks and element."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

import raystow
from integration.ray_train_runs import trainer

PLACE = (0, 2)


def flip(tensor: torch.Tensor) -> None:
    """Flip a bit of the element ``PLACE``."""
    words = tensor.detach().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
    words[PLACE] ^= 4


def check(uri: Path, name: str) -> None:
    """Assert that the newest version, and no older one, has one difference in tensors, of both ranks. Megatron stacks layers."""
    *before, newest = ([one for one in v.record.differences if one.kind == "tensor"] for v in raystow.open(uri).versions())
    assert not any(before)
    (found,) = newest
    assert found.name.endswith(name)
    assert (found.first[-2:], found.elements, {*found.odd, *found.others}) == (PLACE, 1, {0, 1})


def by_run(uri: str, rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = raystow.Run(uri, every=1, rank=rank, world_size=world_size)
    run.shared(model=model, optimizer=optimizer)
    for step in run.steps(2):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step, rank) == (2, 1):
            flip(model.weight)


@pytest.mark.long
def test_a_flip_is_found_by_run(uri: str, cluster: Cluster) -> None:
    place = ray.remote(by_run).options(num_cpus=0, max_retries=0)
    ray.get([place.remote(uri, rank, 2) for rank in range(2)], timeout=120)
    check(Path(uri), "weight")


def by_ray_train(config: dict[str, Any]) -> None:
    weight = torch.zeros(3, 3)
    with raystow.ray_train.Checkpointer() as checkpointer:
        for step in (1, 2):
            if (step, checkpointer.rank) == (2, 1):
                flip(weight)
            checkpointer.save({"weight": weight}, step=step).result(60)


@pytest.mark.long
@pytest.mark.parametrize("name", ["ray_train", "lightning", "transformers"])
def test_a_flip_is_found_in_ray_train(name: str, tmp_path: Path, cluster: Cluster) -> None:
    from integration.ray_trainer_runs import TRAINERS  # with Lightning and Transformers

    function = TRAINERS.get(name, by_ray_train)
    trainer(tmp_path, {"steps": 2, "pace": 0.0, "flip": 2}, function=function).fit()
    check(tmp_path / "ray" / "run" / "raystow", "weight")


def in_deepspeed(engine: Any) -> None:
    from integration.deepspeed_ranks import train

    for step in (1, 2):
        train(engine, 1)
        if (step, engine.global_rank) == (2, 1):
            flip(engine.module.frozen.weight)
        engine.save_checkpoint("checkpoints")


@pytest.mark.parametrize("stage", [1, 2])
def test_a_flip_is_found_in_deepspeed(stage: int, cluster: Cluster, tmp_path: Path) -> None:
    """In a weight that DeepSpeed does not divide."""
    pytest.importorskip("deepspeed", reason="make test-frameworks installs DeepSpeed in an environment of its own")
    from integration.deepspeed_ranks import config, run

    uri = tmp_path / "run"
    run(tmp_path / "ranks", 2, cluster.address, str(uri), config(stage, "fp32"), in_deepspeed)
    check(uri, "frozen.weight")


def in_megatron(training: Any, uri: str) -> None:
    import raystow.megatron

    with raystow.Checkpointer(uri) as checkpointer:
        for step in (1, 2):
            training.train(1)
            if (step, checkpointer.rank) == (2, 1):
                flip(next(one for name, one in training.model[0].named_parameters() if "fc2.weight" in name))
            raystow.megatron.save(checkpointer, training.state(), step=training.step_number).result(60)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_flip_is_found_in_megatron(sharded: bool, cluster: Cluster, tmp_path: Path) -> None:
    """In a weight, of which all data-parallel ranks have a replica."""
    pytest.importorskip("megatron.core", reason="make test-frameworks installs Megatron-Core in an environment of its own")
    from integration.megatron_ranks import Layout, run

    uri = tmp_path / "run"
    run(tmp_path / "ranks", cluster.address, Layout(dp=2, sharded=sharded), in_megatron, str(uri))
    check(uri, "weight")
