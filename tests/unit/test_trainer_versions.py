"""The callbacks of trainers restore the requested version, or the latest one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import raystow


class EmptyRun:
    """A Checkpointer of a run without versions. ``asked``: the versions that a callback has requested."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def restore(self, into: dict[str, Any], version: Any = "latest") -> None:
        assert {"model", "optim", "trainer"} <= into.keys()
        self.asked.append(version)


@pytest.mark.parametrize(("option", "asked"), [({}, "latest"), ({"version": "step:60"}, "step:60")])
def test_a_callback_restores_the_requested_version(option: dict[str, str], asked: str) -> None:
    model, run = nn.Linear(2, 2), EmptyRun()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    loops = SimpleNamespace(state_dict=dict)
    trainer = SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[], fit_loop=loops, global_step=0)
    raystow.lightning.Checkpointing(run, every_n_steps=1, **option).on_fit_start(trainer, model)

    trainer = SimpleNamespace(model=model, create_optimizer=lambda: optimizer, is_deepspeed_enabled=False)
    assert raystow.huggingface.Checkpointing(run, every_n_steps=1).resume(trainer, **option) is None
    assert run.asked == [asked, asked]
