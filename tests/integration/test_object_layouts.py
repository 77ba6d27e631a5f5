"""Modules, optimizers and other objects as such in a state: saved by one layout of ranks and restored by the same or another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.cluster_utils import Cluster
from torch import nn
from torch.optim.lr_scheduler import StepLR

import raystow
from integration.layouts import STEPS, ProcessGroup, build, state_of, train, whole
from raystow.state.planner import plan_save


@pytest.fixture(scope="module")
def world(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessGroup]:
    world = ProcessGroup(tmp_path_factory.mktemp("groups"))
    yield world
    world.close()


def made(layout: str, rank: int, n: int, tag: str, seed: int) -> dict[str, Any]:
    """A training on one rank."""
    model, optimizer = build(layout, n, seed, tag)
    torch.manual_seed(seed * 100 + rank)
    return {
        "model": model,
        "optim": optimizer,
        "sched": StepLR(optimizer, 3),
        "own": raystow.PerRank({"seen": torch.zeros(3, dtype=torch.int64), "n": 0}),
        "rng": raystow.Rng(),
    }


def go_on(state: dict[str, Any]) -> list[Any]:
    """Train on, and return what is computed and drawn."""
    found = list[Any]()
    for _ in range(STEPS):
        found += train(state["model"], state["optim"], 1)
        state["sched"].step()
    return [*found, state["optim"].param_groups[0]["lr"], torch.rand(2).tolist()]


def save(rank: int, n: int, uri: str, layout: str) -> dict[str, Any]:
    with raystow.Checkpointer(uri, memory=64 << 20) as checkpointer:
        state = made(layout, rank, n, "saving" + layout, 1)
        checkpointer.guard(state["optim"])
        assert checkpointer.restore_latest(into=state) is None
        assert not state["optim"].state
        go_on(state)
        state["own"].value = {"seen": torch.arange(3) + rank, "n": rank}
        pending = checkpointer.save(state, step=STEPS)
        digests = whole(state_of(state["model"], state["optim"], flat=False))
        found = go_on(state)
        pending.result(60)
        return {"whole": digests, "after": found}


def restore(rank: int, n: int, uri: str, layout: str, tag: str) -> dict[str, Any]:
    with raystow.Checkpointer(uri, memory=64 << 20) as checkpointer:
        state = made(layout, rank, n, tag + layout, 2)
        places = [getattr(p, "_local_tensor", p).data_ptr() for p in state["model"].parameters()]
        assert checkpointer.restore_latest(into=state) is not None
        assert places == [getattr(p, "_local_tensor", p).data_ptr() for p in state["model"].parameters()]
        digests = whole(state_of(state["model"], state["optim"], flat=False))
        own = state["own"].value
        return {"whole": digests, "after": go_on(state), "own": (own["seen"].tolist(), own["n"])}


def refused(rank: int, n: int) -> str:
    """Return the error for FSDP of version 1."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))
    with pytest.raises(raystow.StateError) as error:
        plan_save({"model": net}, rank=rank, world_size=n)
    return str(error.value)


def test_modules_that_need_collectives_are_refused(world: ProcessGroup) -> None:
    (text,) = world.call("do", 1, refused)
    assert text.startswith('state["model"]: has FullyShardedDataParallel in it (use fully_shard, or pass get_state_dict(')


@pytest.mark.parametrize(
    ("saved", "others"),
    [
        pytest.param(("fsdp", 2), [("fsdp", 1), ("fsdp", 3), ("ddp", 2)], marks=pytest.mark.long),
        (("ddp", 2), [("ddp", 1), ("fsdp", 2)]),
        pytest.param(("fsdp_tp", 4), [("hsdp", 4), ("tp", 2)], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_objects_are_restored_on_any_layout(
    world: ProcessGroup, tmp_path: Path, saved: tuple[str, int], others: list[tuple[str, int]]
) -> None:
    uri, (layout, n) = str(tmp_path / "run"), saved
    answers = world.call("do", n, save, uri, layout)
    expected = answers[0]["whole"]
    again = world.call("do", n, restore, uri, layout, "again")
    assert [answer["after"] for answer in again] == [answer["after"] for answer in answers]
    assert [answer["own"] for answer in again] == [([rank, rank + 1, rank + 2], rank) for rank in range(n)]
    assert all(answer["whole"] == expected for answer in again)
    for other, m in others:
        found = world.call("do", m, restore, uri, other, f"{layout}{m}")
        assert all(answer["whole"] == expected for answer in found)
        draws = [tuple(answer["after"][-1]) for answer in found]
        assert len(set(draws)) == m
        assert draws[: min(n, m)] == [tuple(answer["after"][-1]) for answer in answers[:m]]
        assert [answer["own"] for answer in found[n:]] == [([0, 0, 0], 0)] * max(0, m - n)
