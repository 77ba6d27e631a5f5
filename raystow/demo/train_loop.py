"""The training loop of the demo: FSDP2 on a Ray Train worker, saved with raystow."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import ray.train
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ..orchestrator.client.checkpointer import Checkpointer
from ..orchestrator.client.pending import Pending
from ..storage.errors import RaystowError
from .events import log_event
from .model import GPT, batch, corpus, loss_of
from .settings import BATCH, DemoSettings


def train(config: dict[str, Any]) -> None:
    """Train on one rank.

    Args:
        config: ``settings`` (``DemoSettings``), ``run`` (its name) and ``strike`` (the step whose save the node of the last rank
            does not survive; 0 for never).
    """
    settings: DemoSettings = config["settings"]
    run, strike = config["run"], config["strike"]
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    events = settings.events
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world,))
    model = GPT()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = corpus()

    checkpointer = Checkpointer(settings.stores[run])
    state = {"model": model, "optim": optimizer}
    journal = checkpointer.journal(model, optimizer)
    version = checkpointer.restore_latest(into=state)
    reached = journal.replay() or (0 if version is None else version.step)
    if version is not None:
        log_event(events, "restored", run=run, rank=rank, version=version.id, step=version.step, reached=reached)
    first_try = version is None
    checkpointer.guard(optimizer)

    under_way: list[Pending] = []
    for step in range(reached + 1, settings.steps + 1):
        loss = loss_of(model, batch(data, step=step, rank=rank, size=BATCH))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        journal.record(step, values=step)
        log_event(events, "step", run=run, rank=rank, step=step, loss=loss.item())
        if step % settings.every == 0 or step == settings.steps:
            journal.flush()
            torch.distributed.barrier()  # else a failure during the save might lose this step, on another rank
            torch.distributed.all_reduce(loss.detach())  # in place: the sum over all ranks
            doomed = this_node() if first_try and step == strike and rank == world - 1 else []
            pending = checkpointer.save(state, step=step, metrics={"loss": loss.item() / world})
            under_way.append(pending)
            if doomed:
                kill(doomed, events, run=run, step=step)
        under_way = [pending for pending in under_way if not _settled(pending, events, run, rank)]
    checkpointer.close()
    for pending in under_way:
        _settled(pending, events, run, rank)


def _settled(pending: Pending, events: Path, run: str, rank: int) -> bool:
    if not pending.done():
        return False
    try:
        log_event(events, "durable", run=run, rank=rank, step=pending.step, version=pending.result().id, stall=pending.stall)
    except RaystowError as error:  # the next save may succeed
        log_event(events, "failed", run=run, rank=rank, step=pending.step, reason=str(error))
    return True


def this_node() -> list[psutil.Process]:
    """Return the other processes of this Ray node, the raylet last. Called before the save, which could else become durable."""
    raylet = psutil.Process(os.getppid())
    return [*(child for child in raylet.children(recursive=True) if child.pid != os.getpid()), raylet]


def kill(doomed: list[psutil.Process], events: Path, *, run: str, step: int) -> None:
    """Kill all processes of this Ray node with SIGKILL: node worker, agents, raylet, and this worker last."""
    node = ray.get_runtime_context().get_node_id()
    log_event(events, "killed", run=run, step=step, processes=len(doomed) + 1, node=node)
    for process in doomed:
        process.kill()
    os.kill(os.getpid(), signal.SIGKILL)
