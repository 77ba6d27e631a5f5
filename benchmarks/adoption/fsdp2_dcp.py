"""Train a small language model with Ray Train and FSDP2. It continues after each
failure, by DCP.

python examples/adoption/fsdp2_plain.py FOLDER [STEPS]
"""

import os
import random
import sys
import tempfile

import numpy as np
import ray.train
import torch
import torch.distributed.checkpoint as dcp
from ray.train.torch import TorchConfig, TorchTrainer
from text import TextLoader
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR


def train(config: dict[str, int]) -> None:
    """Train on one rank."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(512, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 256)
    )
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = CosineAnnealingLR(optimizer, config["steps"])
    loader = TextLoader(seed=rank)
    torch.manual_seed(100 + rank)  # dropout differs between the ranks

    def state_of() -> dict[str, object]:
        weights, moments = get_state_dict(model, optimizer)
        generators = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
        own = {"loader": loader.state_dict(), "generators": generators}
        return {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict(), "step": 0, f"rank{rank}": own}

    done, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = state_of()
            dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        own = state[f"rank{rank}"]
        loader.load_state_dict(own["loader"])
        torch.set_rng_state(own["generators"]["torch"])
        np.random.set_state(own["generators"]["numpy"])
        random.setstate(own["generators"]["python"])
        done = state["step"]
    for step in range(done + 1, config["steps"] + 1):
        text, following = next(loader)
        loss = nn.functional.cross_entropy(model(text), following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 10 == 0 or step == config["steps"]:
            with tempfile.TemporaryDirectory() as folder:
                dcp.save({**state_of(), "step": step}, checkpoint_id=folder)
                ray.train.report({"loss": loss.item()}, ray.train.Checkpoint.from_directory(folder))
        print(f"step {step}: rank {rank}, loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    TorchTrainer(
        train,
        train_loop_config={"steps": int(sys.argv[2]) if len(sys.argv) > 2 else 40},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="fsdp2-dcp", storage_path=os.path.abspath(sys.argv[1]), failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    ).fit()
