"""DeepSpeed with ZeRO: asynchronous saves and resumption with any stage and number of processes, also on CPUs.

ray start --head
DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/deepspeed_zero.py /tmp/deepspeed-run 4 2    # four steps of ZeRO 2
DS_ACCELERATOR=cpu torchrun --nproc-per-node 1 examples/deepspeed_zero.py /tmp/deepspeed-run 8 3    # four more of ZeRO 3
"""

from __future__ import annotations

import sys

import deepspeed
import torch
from torch import nn

import raystow.deepspeed


def main(uri: str, steps: int, stage: int) -> None:
    """Train to a step from the newest version."""
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    engine, *_ = deepspeed.initialize(model=model, config=config)
    with raystow.deepspeed.attach(engine, uri, retention=raystow.Policy(keep_last=2)):
        path, _ = engine.load_checkpoint("checkpoints")
        print(f"rank {engine.global_rank} of {engine.world_size}, ZeRO {stage}: loaded {path}, step {engine.global_steps}")
        while engine.global_steps < steps:
            data = torch.randn(8, 64, dtype=torch.bfloat16, device=engine.device)
            engine.backward(engine(data).float().square().mean())
            engine.step()
            engine.save_checkpoint("checkpoints")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
