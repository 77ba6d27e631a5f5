"""FSDP2 with NCCL on several GPUs of one host, in Ray Train: a killed rank costs at most one step, and fewer GPUs go on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

import raystow

DEVICES = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICES < 2, reason="needs two GPUs")]

WIDTH, EVERY, STEPS = 1024, 8, 22
LAYOUTS = ["fsdp2", *(["hsdp"] if DEVICES >= 4 else [])]


def build(layout: str, world: int, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the same model on any number of ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)), nn.Linear(WIDTH, 33))
    shape = (2, world // 2) if layout == "hsdp" and world > 2 else (world,)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("copies", "shard")[-len(shape) :])
    for part in (*model, model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(config: dict[str, Any]) -> None:
    """Train to ``steps``; the last rank kills itself once, in step ``die``. Write the whole state first and last."""
    import ray.train
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    folder, device = Path(config["folder"]), config["device"]
    rank, world = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    model, optimizer = build(config["layout"], world, device)

    def write(name: str) -> None:
        weights, moments = get_state_dict(model, optimizer)
        tensors = {**weights, **{f"{name}.{key}": one for name, of in moments["state"].items() for key, one in of.items()}}
        whole = {name: one.full_tensor().cpu() for name, one in tensors.items() if isinstance(one, DTensor)}
        if rank == 0:
            save_file(whole, folder / f"{name}-{world}.safetensors")

    with raystow.ray_train.Checkpointer(timeout=60) as checkpointer:
        checkpointer.guard(optimizer)
        journal = checkpointer.journal(model, optimizer)
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments, "step": 0}
        if checkpointer.restore_latest(into=state):
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        else:
            optimizer.state.clear()  # get_state_dict has counted a step
        values = journal.replay() or {"step": state["step"]}
        if values["step"]:
            write(f"begin-{values['step']}")
        for step in range(values["step"] + 1, config["steps"] + 1):
            data = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank)).to(device)
            optimizer.zero_grad()
            model(data).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            if step == config["die"] and rank == world - 1 and not (folder / "died").exists():
                (folder / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            journal.record(step, values={"step": step})
            if step % EVERY == 0:
                weights, moments = get_state_dict(model, optimizer)
                checkpointer.save({"model": weights, "optim": moments, "step": step}, step=step)
        write(f"end-{config['steps']}")


def fit(folder: Path, layout: str, *, ranks: int, steps: int = STEPS, die: int = 0, device: str = "cuda") -> None:
    """Train, or go on with the training in ``folder``."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    folder.mkdir(exist_ok=True)
    TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "layout": layout, "steps": steps, "die": die, "device": device},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"),
        scaling_config=ScalingConfig(num_workers=ranks, use_gpu=device == "cuda"),
        run_config=RunConfig(name="run", storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=2)),
    ).fit()


def check_same(folder: Path, name: str, other: Path) -> None:
    got, expected = load_file(folder / f"{name}.safetensors"), load_file(other)
    assert len(got) == 30
    assert got.keys() == expected.keys()
    assert [name for name in got if not got[name].equal(expected[name])] == []


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # workers import this module
        ray.init(num_cpus=8, num_gpus=DEVICES, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_rank_costs_at_most_one_step(layout: str, folder: Path, cluster: None) -> None:
    killed, undisturbed, fewer = folder / "killed", folder / "undisturbed", DEVICES // 2
    fit(killed, layout, ranks=DEVICES, die=19)
    fit(undisturbed, layout, ranks=DEVICES)
    (begin,) = killed.glob("begin-*")
    assert begin.name in (f"begin-{step}-{DEVICES}.safetensors" for step in (17, 18))
    end = undisturbed / f"end-{STEPS}-{DEVICES}.safetensors"
    check_same(killed, f"end-{STEPS}-{DEVICES}", end)
    fit(killed, layout, ranks=fewer, steps=STEPS + 4)
    check_same(killed, f"begin-{STEPS}-{fewer}", end)
    assert (killed / f"end-{STEPS + 4}-{fewer}.safetensors").exists()
