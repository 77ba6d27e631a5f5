"""In a Ray Train worker: rank and world size are found, and a new run goes on where the last one stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raystow


def train(config: dict[str, Any]) -> None:
    import ray.train
    import torch

    import raystow

    with raystow.Checkpointer(config["uri"]) as checkpointer:
        state = {"w": torch.zeros(1000), "step": 0, "rank": None}
        version = checkpointer.restore_latest(into=state)
        assert (version is None) == (config["first"] == 0)
        assert state["step"] == config["first"]
        assert state["rank"] in (None, ray.train.get_context().get_world_rank())
        assert torch.equal(state["w"], torch.full((1000,), float(config["first"])))
        state["rank"] = checkpointer.rank
        for step in range(config["first"] + 1, config["first"] + 4):
            checkpointer.fence()
            state["w"] += 1
            state["step"] = step
            pending = checkpointer.save(state, step=step)
        assert pending.result(60).world_size == 2
    ray.train.report({"done": checkpointer.rank})


@pytest.mark.usefixtures("cluster")
def test_two_runs_of_two_workers(tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    uri = str(tmp_path / "run")
    for first in (0, 3):
        TorchTrainer(
            train,
            train_loop_config={"uri": uri, "first": first},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(name=f"run-{first}", storage_path=str(tmp_path / "ray")),
        ).fit()
    assert [version.step for version in raystow.open(uri).versions()] == [1, 2, 3, 4, 5, 6]
