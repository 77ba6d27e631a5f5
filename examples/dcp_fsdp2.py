"""FSDP2 with torch.distributed.checkpoint: asynchronous saves and resumption on any number of processes, without Ray.

torchrun --nproc-per-node 2 examples/dcp_fsdp2.py /tmp/dcp-run 4    # four steps
torchrun --nproc-per-node 1 examples/dcp_fsdp2.py /tmp/dcp-run 8    # four more
"""

from __future__ import annotations

import sys
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import raystow
from raystow.dcp import Reader, Writer


def has_version(uri: str) -> bool:
    """Return whether there is a version to resume from."""
    try:
        return raystow.latest(uri) is not None
    except raystow.NotARepository:
        return False


def main(uri: str, steps: int) -> None:
    """Train to a step from the newest version."""
    dist.init_process_group()
    group = dist.new_group(backend="gloo")  # the saves run at the same time as the training
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    model = fully_shard(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optim": moments, "step": 0}
    if has_version(uri):
        dcp.load(state, storage_reader=Reader(uri))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    else:
        optimizer.state.clear()  # get_state_dict has counted a step
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: starts at step {state['step']}")
    saving: Future[Any] | None = None
    for step in range(state["step"] + 1, steps + 1):
        data = torch.randn(8, 64, device="cuda" if torch.cuda.is_available() else "cpu")
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if saving is not None:
            saving.result()
        weights, moments = get_state_dict(model, optimizer)
        writer = Writer(uri, step=step, retention=raystow.Policy(keep_last=2))
        saving = dcp.async_save({"model": weights, "optim": moments, "step": step}, storage_writer=writer, process_group=group)
    if saving is not None:
        saving.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
