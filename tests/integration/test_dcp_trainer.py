"""A trainer like torchtitan's: it passes DCP objects with ``state_dict`` and ``load_state_dict``, among them FSDP2 weights,
and uses only raystow's Writer and Reader."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

import raystow
from integration.gloo import Ranks
from integration.layouts import build
from raystow.dcp import Reader, Writer

EXAMPLE = Path(__file__).parents[2] / "examples" / "dcp_fsdp2.py"
EVERY = 2
_TAGS = itertools.count()


class Weights(Stateful):
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state, options=StateDictOptions(strict=False))


class Moments(Stateful):
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=self.options)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state, options=self.options)


class Progress(Stateful):
    """The progress of training, equal on all ranks."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Loader(Stateful):
    """The data of one rank; its position is saved as bytes under a key of that rank."""

    def __init__(self, rank: int, n: int) -> None:
        self.key, self.world, self.generator = f"dp_rank_{rank}", n, torch.Generator().manual_seed(rank)

    def batch(self) -> torch.Tensor:
        return torch.randn(8, 24, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {self.key: self.generator.get_state().numpy().tobytes(), "world_size": self.world}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(torch.frombuffer(bytearray(state[self.key]), dtype=torch.uint8))


def run_trainer(rank: int, n: int, uri: str, steps: int, soon: bool) -> list[str]:
    """Train up to ``steps`` from the newest version in the repository; return the losses as hexadecimal floats."""
    begun = Path(uri, "raystow.json").exists()
    model, optimizer = build("fsdp", n, 5 if begun else 1, f"trainer{n}x{next(_TAGS)}")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    progress, loader = Progress(), Loader(rank, n)
    group = dist.new_group(backend="gloo")  # async_save runs its collectives during those of the training

    def states() -> dict[str, Any]:
        others = {"optimizer": Moments(model, optimizer), "lr_scheduler": schedule, "dataloader": loader, "train_state": progress}
        return {**Weights(model).state_dict(), **others}

    if begun:
        state = states()
        dcp.load(state, storage_reader=Reader(uri))
        Weights(model).load_state_dict({name: value for name, value in state.items() if isinstance(value, torch.Tensor)})
    losses, saving = list[str](), None
    while progress.step < steps:
        loss = model(loader.batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        progress.step += 1
        losses.append(loss.item().hex())
        if progress.step % EVERY:
            continue
        writer = Writer(uri, step=progress.step)
        if soon:
            if saving is not None:
                saving.result()
            saving = dcp.async_save(states(), storage_writer=writer, process_group=group)
        else:
            dcp.save(states(), storage_writer=writer)
    if saving is not None:
        saving.result()
    return losses


@pytest.mark.parametrize("soon", [pytest.param(False, marks=pytest.mark.slow, id="save"), pytest.param(True, id="async_save")])
def test_a_restarted_trainer_continues_bit_for_bit(ranks: Ranks, tmp_path: Path, soon: bool) -> None:
    whole = ranks.call(2, run_trainer, str(tmp_path / "whole"), 6, soon)
    first = ranks.call(2, run_trainer, str(tmp_path / "halves"), 4, soon)
    second = ranks.call(2, run_trainer, str(tmp_path / "halves"), 6, soon)
    assert [a + b for a, b in zip(first, second, strict=True)] == whole
    assert whole[0] != whole[1]  # each rank has its own data
    repository = raystow.open(tmp_path / "halves")
    assert [version.step for version in repository.versions()] == [2, 4, 6]
    for version in repository.versions():
        repository.verify(version)


@pytest.mark.long
def test_the_example_resumes_on_fewer_ranks(tmp_path: Path) -> None:
    def printed(ranks: int, steps: int) -> str:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*launch, str(EXAMPLE), str(tmp_path / "run"), str(steps)]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=120, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        ).stdout

    assert "rank 1 of 2: starts at step 0" in printed(2, 2)
    assert "rank 0 of 1: starts at step 2" in printed(1, 4)
    assert [version.step for version in raystow.open(tmp_path / "run").versions()] == [3, 4]
