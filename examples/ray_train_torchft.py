"""Ray Train with torchft: a killed worker is restarted and receives its state from the memory of the other worker's node.

python examples/ray_train_torchft.py /tmp/torchft-run 30 10      # 30 steps; worker 1 is killed after step 10
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray.train
import torch
import torchft
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.torch.torchft_config import TorchftConfig
from torch import nn

import raystow.torchft


def train(settings: dict[str, Any]) -> None:
    """Train one replica: each worker is its own replica group."""
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(rank)  # replicas start with different states: torchft copies the state of one to all
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)

    healed = list[int]()

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": adamw.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adamw.load_state_dict(state["optim"])
        healed.append(manager.current_step())

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=2,  # a single replica does not continue
        rank=0,
        world_size=1,
        replica_id=f"replica_{rank}",
        checkpoint_transport=raystow.torchft.CheckpointTransport(state_dict),
    )
    parallel, optimizer = torchft.DistributedDataParallel(manager, model), torchft.Optimizer(manager, adamw)
    while manager.current_step() < settings["steps"]:
        optimizer.zero_grad()
        parallel(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        if rank == 1 and manager.current_step() == settings["kill_after"] and not settings["marker"].exists():
            settings["marker"].touch()
            os.kill(os.getpid(), signal.SIGKILL)
    total = torch.cat([weight.flatten() for weight in model.state_dict().values()]).double().sum().item()
    told = f"got the state of step {healed}; ended at step {manager.current_step()}, sum {total.hex()}"
    Path(settings["marker"].parent, f"replica_{rank}.txt").write_text(f"replica {rank}: {told}\n")
    manager.shutdown()


def main(folder: Path, steps: int, kill_after: int) -> None:
    """Train two replicas."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"steps": steps, "kill_after": kill_after, "marker": folder / "killed"}
    TorchTrainer(
        train,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchftConfig(lighthouse_kwargs={"min_replicas": 1}, backend="gloo"),
        run_config=RunConfig(storage_path=str(folder), failure_config=FailureConfig(max_failures=3)),
    ).fit()
    for told in sorted(folder.glob("replica_*.txt")):
        print(told.read_text(), end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
