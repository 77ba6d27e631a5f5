"""Train a small language model with DDP. It starts anew after each failure.

torchrun --nproc-per-node 2 examples/adoption/ddp_plain.py [STEPS]
"""

import math
import sys

import torch
from text import TextLoader
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

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

for step in range(1, STEPS + 1):
    for _ in range(2):  # gradient accumulation
        text, following = next(loader)
        loss = nn.functional.cross_entropy(ddp(text), following) / 2
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    average.update_parameters(model)
    print(f"step {step}: rank {rank}, loss {loss.item():.6f}", flush=True)

distributed.destroy_process_group()
