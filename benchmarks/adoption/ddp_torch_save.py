"""Train a small language model with DDP. It continues after each failure, by ``torch.save``.

torchrun --nproc-per-node 2 examples/adoption/ddp_torch_save.py [STEPS]
"""

import math
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
from text import TextLoader
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

EVERY, FOLDER = 10, Path("runs/ddp-torch-save")
STEPS = int(sys.argv[-1]) if sys.argv[-1].isdecimal() else 40

distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(256, 32), nn.Flatten(), nn.Linear(16 * 32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 256)
)
decayed = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.parameters() if p.ndim < 2]
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=3e-3)
scheduler = LambdaLR(optimizer, lambda n: min(1, (n + 1) / 5) * (1 + math.cos(math.pi * n / STEPS)) / 2)
loader = TextLoader(seed=rank)  # an own loader: batches of 16 characters and the next one
torch.manual_seed(100 + rank)  # dropout differs between the ranks


def save(step: int) -> None:
    """Save a checkpoint: shared state by rank 0, then what each rank has, then the name of the newest."""
    folder = FOLDER / str(step)
    folder.mkdir(parents=True, exist_ok=True)
    shared = {"model": model, "average": average, "optimizer": optimizer, "scheduler": scheduler}
    generators = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    own = {"loader": loader.state_dict(), "generators": generators}
    if rank == 0:
        torch.save({name: one.state_dict() for name, one in shared.items()}, folder / "shared.pt")
    torch.save(own, folder / f"rank{rank}.pt")
    distributed.barrier()  # all files are there
    if rank == 0:
        (FOLDER / "newest.tmp").write_text(str(step))
        os.replace(FOLDER / "newest.tmp", FOLDER / "newest")


def resume() -> int:
    """Load the newest checkpoint, and return its step."""
    if not (FOLDER / "newest").exists():
        return 0
    step = int((FOLDER / "newest").read_text())
    shared = torch.load(FOLDER / str(step) / "shared.pt", weights_only=True)
    for name, one in {"model": model, "average": average, "optimizer": optimizer, "scheduler": scheduler}.items():
        one.load_state_dict(shared[name])
    own = torch.load(FOLDER / str(step) / f"rank{rank}.pt", weights_only=False)
    loader.load_state_dict(own["loader"])
    torch.set_rng_state(own["generators"]["torch"])
    np.random.set_state(own["generators"]["numpy"])
    random.setstate(own["generators"]["python"])
    return step


for step in range(resume() + 1, STEPS + 1):
    for _ in range(2):  # gradient accumulation
        text, following = next(loader)
        loss = nn.functional.cross_entropy(ddp(text), following) / 2
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    average.update_parameters(model)
    if step % EVERY == 0 or step == STEPS:
        save(step)
    print(f"step {step}: rank {rank}, loss {loss.item():.6f}", flush=True)

distributed.destroy_process_group()
