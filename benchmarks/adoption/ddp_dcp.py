"""Train a small language model with DDP. It continues after each failure, by DCP.

torchrun --nproc-per-node 2 examples/adoption/ddp_plain.py [STEPS]
"""

import math
import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from text import TextLoader
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

EVERY, FOLDER = 10, Path("runs/ddp-dcp")
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


def state_of() -> dict[str, object]:
    """Return all that belongs to the training. What differs between the ranks has the rank in its name."""
    weights, moments = get_state_dict(model, optimizer)
    generators = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    own = {"loader": loader.state_dict(), "generators": generators}
    shared = {"average": average.state_dict(), "scheduler": scheduler.state_dict()}
    return {"model": weights, "optimizer": moments, **shared, f"rank{rank}": own}


def resume() -> int:
    """Load the newest checkpoint, and return its step."""
    done = [int(one.parent.name) for one in FOLDER.glob("*/.metadata")]
    if not done:
        optimizer.state.clear()  # get_state_dict would have counted a step
        return 0
    state = state_of()
    dcp.load(state, checkpoint_id=str(FOLDER / str(max(done))))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    average.load_state_dict(state["average"])
    scheduler.load_state_dict(state["scheduler"])
    own = state[f"rank{rank}"]
    loader.load_state_dict(own["loader"])
    torch.set_rng_state(own["generators"]["torch"])
    np.random.set_state(own["generators"]["numpy"])
    random.setstate(own["generators"]["python"])
    return max(done)


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
        dcp.save(state_of(), checkpoint_id=str(FOLDER / str(step)))
    print(f"step {step}: rank {rank}, loss {loss.item():.6f}", flush=True)

distributed.destroy_process_group()
