"""A process whose tensors are on the second GPU takes no memory of the first one, which another rank fills."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PROCESS = """
import sys

import ray
import torch

import raystow

torch.cuda.set_device(1)
model = torch.nn.Linear(2048, 2048, device="cuda:1")
optimizer = torch.optim.AdamW(model.parameters())
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
with raystow.Checkpointer(sys.argv[1], rank=0, world_size=1) as ckpt:
    state = {name: value.detach() for name, value in model.state_dict().items()}
    ckpt.save(state, step=1).result()
    assert ckpt.restore_latest(into=state).step == 1
    journal = ckpt.journal(model, optimizer)
    journal.replay()
    model(torch.ones(1, 2048, device="cuda:1")).sum().backward()
    optimizer.step()
    journal.record(2)
print([torch._C._cuda_hasPrimaryContext(index) for index in (0, 1)])
"""


def test_a_rank_takes_no_memory_of_another_gpu(folder: Path) -> None:
    command = [sys.executable, "-c", PROCESS, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.stdout.splitlines()[-1:] == ["[False, True]"], done.stderr
