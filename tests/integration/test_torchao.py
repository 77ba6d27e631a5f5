"""torchao under FSDP2 on two ranks: low-bit optimizers resume as undisturbed, float8 weights come back bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ray.cluster_utils import Cluster

import raystow
from integration.layouts import ProcessGroup, whole
from raystow.dcp import Reader, Writer

pytest.importorskip("torchao.optim", reason="make test-frameworks installs torchao in an environment of its own")

STEPS = 3


@pytest.fixture(scope="module")
def world(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessGroup]:
    world = ProcessGroup(tmp_path_factory.mktemp("groups"))
    yield world
    world.close()


def build(kind: str, n: int, seed: int) -> tuple[Any, Any]:
    """Return a model under FSDP2 and its optimizer. The bias of the head is too small to be quantized; rank 1 has no row of the
    head, so its state is a plain tensor there."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchao import optim

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (n,)))
    return model, getattr(optim, kind)(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(100 + step)
        model(torch.randn(16, 64)).square().mean().backward()
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
        optimizer.zero_grad()


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


def parts(optimizer: Any) -> list[dict[str, Any]]:
    """Return digests of this rank's inner tensors and plain tensors."""
    found: list[dict[str, Any]] = []
    for state in optimizer.state.values():
        for value in state.values():
            local = getattr(value, "_local_tensor", value)
            names = local.__tensor_flatten__()[0] if hasattr(local, "__tensor_flatten__") else ()
            found.append(whole({name: getattr(local, name) for name in names} or {"plain": local}))
    return found


def undisturbed(rank: int, n: int, kind: str, uri: str) -> dict[str, Any]:
    """Train, save by the Checkpointer and by DCP, and go on."""
    model, optimizer = build(kind, n, 1)
    train(model, optimizer, STEPS)
    with raystow.Checkpointer(uri, memory=64 << 20) as checkpointer:
        pending = checkpointer.save(state_of(model, optimizer), step=STEPS)
        checkpointer.fence()
        pending.result(60)
    dcp.save(state_of(model, optimizer), storage_writer=Writer(f"{uri}-dcp"))
    saved = parts(optimizer)
    train(model, optimizer, STEPS)
    return {"saved": saved, "weights": whole(model.state_dict()), "optim": parts(optimizer)}


def resumed(rank: int, n: int, kind: str, uri: str, through: str) -> dict[str, Any]:
    """Restore into a new training, and go on."""
    model, optimizer = build(kind, n, 2)
    train(model, optimizer, 1)  # makes the optimizer's state
    state = state_of(model, optimizer)
    if through == "dcp":
        dcp.load(state, storage_reader=Reader(f"{uri}-dcp"))
    else:
        with raystow.Checkpointer(uri, memory=64 << 20) as checkpointer:
            checkpointer.restore_latest(into=state)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])
    saved = parts(optimizer)
    train(model, optimizer, STEPS)
    return {"saved": saved, "weights": whole(model.state_dict()), "optim": parts(optimizer)}


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_a_resumed_training_is_an_undisturbed_one(
    world: ProcessGroup, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    uri = str(tmp_path_factory.mktemp("run") / "run")
    expected = world.call("do", 2, undisturbed, kind, uri)
    names = raystow.open(uri).latest().tensors()
    assert any(name.startswith("optim.state.0.exp_avg.codes") for name in names)
    for through in ("checkpointer", "dcp"):
        assert world.call("do", 2, resumed, kind, uri, through) == expected, through


def float8_model(n: int, seed: int) -> Any:
    """Return a model under FSDP2 whose weights are gathered as float8."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))
    fully_shard(model, mesh=init_device_mesh("cpu", (n,)))
    return model


def float8_weights(rank: int, n: int, uri: str, how: str) -> list[str]:
    """Save a model and restore it into another one; return the classes of the local tensors."""
    model, fresh = float8_model(n, 1), float8_model(n, 2)
    state, into = {"model": dict(model.named_parameters())}, {"model": dict(fresh.named_parameters())}
    if how == "dcp":
        dcp.save(state, storage_writer=Writer(uri, step=2))
        dcp.load(into, storage_reader=Reader(uri))
    else:
        with raystow.Checkpointer(uri, memory=64 << 20) as checkpointer:
            torch.distributed.barrier()
            checkpointer.save(state, step=2).result(60)
            checkpointer.restore_latest(into=into)
    for one, other in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one._local_tensor._tensor, other._local_tensor._tensor)
    return [type(one._local_tensor).__name__ for one in fresh.parameters()]


@pytest.mark.parametrize("how", ["checkpointer", "dcp"])
def test_float8_weights_come_back(world: ProcessGroup, tmp_path: Path, how: str) -> None:
    for kinds in world.call("do", 2, float8_weights, str(tmp_path / "run"), how):
        assert kinds == ["WeightWithDynamicFloat8CastTensor"]
