"""Train a small language model with Ray Train and FSDP2. It continues after each
failure, by ``torch.save``.

python examples/adoption/fsdp2_plain.py FOLDER [STEPS]
"""

import os
import random
import sys
import tempfile

import numpy as np
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from text import TextLoader
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
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

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    loading = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    def own() -> dict[str, object]:
        generators = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
        return {"loader": loader.state_dict(), "generators": generators, "scheduler": scheduler.state_dict()}

    done, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            shared = torch.load(os.path.join(folder, "shared.pt"), weights_only=False)
            mine = torch.load(os.path.join(folder, f"rank{rank}.pt"), weights_only=False)
        weights, moments = (shared["model"], shared["optimizer"]) if rank == 0 else ({}, {})
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=loading)
        scheduler.load_state_dict(mine["scheduler"])
        loader.load_state_dict(mine["loader"])
        torch.set_rng_state(mine["generators"]["torch"])
        np.random.set_state(mine["generators"]["numpy"])
        random.setstate(mine["generators"]["python"])
        done = shared["step"]
    for step in range(done + 1, config["steps"] + 1):
        text, following = next(loader)
        loss = nn.functional.cross_entropy(model(text), following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 10 == 0 or step == config["steps"]:
            with tempfile.TemporaryDirectory() as folder:
                weights, moments = get_state_dict(model, optimizer, options=whole)
                if rank == 0:
                    torch.save({"model": weights, "optimizer": moments, "step": step}, os.path.join(folder, "shared.pt"))
                torch.save(own(), os.path.join(folder, f"rank{rank}.pt"))
                ray.train.report({"loss": loss.item()}, ray.train.Checkpoint.from_directory(folder))
        print(f"step {step}: rank {rank}, loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    TorchTrainer(
        train,
        train_loop_config={"steps": int(sys.argv[2]) if len(sys.argv) > 2 else 40},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="fsdp2-torch-save",
            storage_path=os.path.abspath(sys.argv[1]),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    ).fit()
