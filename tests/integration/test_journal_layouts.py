"""The step journal with DTensors: FSDP2, HSDP and DDP on gloo ranks. Each rank has its own journal here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.journal_port import EntryBox, snapshot
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from integration.gloo import Ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("groups"))
    yield ranks
    ranks.close()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(33, 33) for _ in range(3))  # 33 is not divisible by the world size
        self.head = nn.Linear(33, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def build(layout: str, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = Net()
    if layout == "ddp":
        model = DistributedDataParallel(model)
    else:
        shape, names = ((world,), ("shard",)) if layout != "hsdp" else ((2, world // 2), ("copies", "shard"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = mixed if layout == "fsdp2-mixed" else MixedPrecisionPolicy()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def check(rank: int, world: int, layout: str) -> list[int]:
    """Record three steps with gradient accumulation and clipping, and replay them in a new model; return the sizes of the
    entries."""
    box = EntryBox()
    model, optimizer = build(layout, world)
    journal = box.journal(model, optimizer)
    journal.replay()
    generator = torch.Generator().manual_seed(rank)
    for number in range(1, 4):
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.randn(8, 33, generator=generator)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        journal.record(number, values=number)
    journal.close()
    assert layout == "ddp" or any(isinstance(one, DTensor) for one in model.parameters())
    again, theirs = build(layout, world)
    other = box.journal(again, theirs)
    assert other.replay() == 3
    other.close()
    assert local(again, theirs) == local(model, optimizer)
    return [info.size for info in box.entries]


def local(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Return all bits of this rank's part."""

    class Parts:
        param_groups = optimizer.param_groups
        state = {
            parameter: {key: getattr(value, "_local_tensor", value) for key, value in state.items()}
            for parameter, state in optimizer.state.items()
        }

    class Weights:
        def parameters(self) -> list[torch.Tensor]:
            return [getattr(one, "_local_tensor", one) for one in model.parameters()]

        def buffers(self) -> list[torch.Tensor]:
            return list(model.buffers())

    groups = [{**group, "params": []} for group in Parts.param_groups]
    moments = [value for state in Parts.state.values() for value in state.values()]
    return [*snapshot(Weights()), repr(groups).encode(), *(one.numpy().tobytes() for one in moments)]  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp2-mixed", "ddp"])
def test_shards_are_replayed_bit_for_bit(layout: str, ranks: Ranks) -> None:
    assert all(len(sizes) == 3 for sizes in ranks.call(2, check, layout))


@pytest.mark.slow
def test_hybrid_shards_are_replayed_bit_for_bit(ranks: Ranks) -> None:
    assert all(len(sizes) == 3 for sizes in ranks.call(4, check, "hsdp"))
