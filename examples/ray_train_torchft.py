"""Ray Train with torchft: a killed replica gets its state from a living one, and raystow keeps durable versions.

python examples/ray_train_torchft.py /tmp/torchft-run 30 12      # 30 steps; worker 1 is killed after step 12
python examples/ray_train_torchft.py /tmp/torchft-run 40         # all processes are new: from the newest version to step 40
"""

from __future__ import annotations

import contextlib
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

import raystow

EVERY = 5  # steps between versions


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

    def heal(state: dict[str, Any]) -> None:
        load_state_dict(state)
        healed.append(manager.current_step())

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=heal,
        state_dict=state_dict,
        min_replica_size=2,  # a single replica does not continue
        rank=0,
        world_size=1,
        replica_id=f"replica_{rank}",
    )
    state = {"model": model.state_dict(), "optim": raystow.AsSaved(device="cpu"), "torchft": manager.state_dict()}
    with contextlib.suppress(raystow.NotARepository):  # nothing is saved yet
        if raystow.restore_latest(settings["uri"], into=state):
            load_state_dict(state)
            manager.load_state_dict(state["torchft"])
    restored = step = manager.current_step()

    checkpointer: raystow.Checkpointer | None = None
    parallel, optimizer = torchft.DistributedDataParallel(manager, model), torchft.Optimizer(manager, adamw)
    while step < settings["steps"]:
        optimizer.zero_grad()
        parallel(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        if manager.current_step() == step:  # the replicas did not agree on this step
            continue
        step = manager.current_step()
        if rank == 1 and step == settings["kill_after"] and not settings["marker"].exists():
            settings["marker"].touch()
            os.kill(os.getpid(), signal.SIGKILL)
        saves = manager.participating_rank() == 0  # one replica saves; another one takes over when it is gone
        if checkpointer is not None and not saves:
            checkpointer.close()
            checkpointer = None
        if saves and (step % EVERY == 0 or step == settings["steps"]):
            if checkpointer is None:
                checkpointer = raystow.Checkpointer(settings["uri"], rank=0, world_size=1)
                checkpointer.guard(adamw)
            checkpointer.save({**state_dict(), "torchft": manager.state_dict()}, step=step)
    if checkpointer is not None:
        checkpointer.close()
    total = torch.cat([weight.flatten() for weight in model.state_dict().values()]).double().sum().item()
    line = f"restored step {restored}, got the state of step {healed}; ended at step {step}, sum {total.hex()}"
    Path(settings["marker"].parent, f"replica_{rank}.txt").write_text(f"replica {rank}: {line}\n")
    manager.shutdown()


def main(folder: Path, steps: int, kill_after: int) -> None:
    """Train two replicas."""
    folder.mkdir(parents=True, exist_ok=True)
    TorchTrainer(
        train,
        train_loop_config={
            "uri": str(folder / "versions"),
            "steps": steps,
            "kill_after": kill_after,
            "marker": folder / "killed",
        },
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchftConfig(lighthouse_kwargs={"min_replicas": 1}, backend="gloo"),
        run_config=RunConfig(storage_path=str(folder), failure_config=FailureConfig(max_failures=3)),
    ).fit()
    for result in sorted(folder.glob("replica_*.txt")):
        print(result.read_text(), end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
