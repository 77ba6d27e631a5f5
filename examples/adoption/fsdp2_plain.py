"""Train a small language model with Ray Train and FSDP2. It starts anew after each failure.

python examples/adoption/fsdp2_plain.py FOLDER [STEPS]
"""

import os
import sys

import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from text import TextLoader
from torch import nn
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

    for step in range(1, config["steps"] + 1):
        text, following = next(loader)
        loss = nn.functional.cross_entropy(model(text), following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        ray.train.report({"loss": loss.item()})
        print(f"step {step}: rank {rank}, loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    TorchTrainer(
        train,
        train_loop_config={"steps": int(sys.argv[2]) if len(sys.argv) > 2 else 40},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(name="fsdp2", storage_path=os.path.abspath(sys.argv[1])),
    ).fit()
