"""The first saves through a Checkpointer: what a restart would miss is in the log of rank 0, and in the warnings of the save."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raystow
from integration.ranks import Rank, every, start

pytestmark = pytest.mark.usefixtures("cluster")


def train(self: Rank, complete: bool) -> list[tuple[tuple[str, ...], list[str]]]:
    """Start afresh, and save three steps; return the warnings of each save, and the lines of the log meanwhile."""
    logged = list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("raystow").addHandler(handler)
    torch.manual_seed(0)  # all ranks begin with the same weights, and drop the same ones
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    rest: dict[str, Any] = {"scheduler": scheduler, "rng": raystow.Rng()} if complete else {}
    state = {"model": model, "optim": optimizer, "step": 0, **rest}
    assert self.checkpointer.restore_latest(into=state if complete else {"model": model}) is None
    found = []
    for step in range(1, 4):
        if complete:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            scheduler.step()
            state["step"] = step
        pending = self.checkpointer.save(state, step=step)
        warnings = pending.warnings
        pending.result(60)
        found.append((warnings, [line for line in logged if line.startswith(f"save of step {step}: ")]))
    logging.getLogger("raystow").removeHandler(handler)
    return found


def test_rank_0_notices_missing_parts(tmp_path: Path) -> None:
    first, other = every(start(str(tmp_path), 2), "do", train, False)
    for step, (warnings, logged) in enumerate(first, 1):
        assert logged == [f"save of step {step}: {text}" for text in warnings]
    (one, _), (two, _), (three, _) = first
    for part in ("its `into` differs", "an optimizer without state", "no learning rate scheduler", "no random generators"):
        assert sum(part in text for text in one) == 1
    assert len(one) == 4
    assert len(two) == 1
    assert 'no plain value has changed since the save of step 1: state["step"]' in two[0]
    assert three == ()
    assert other == [((), [])] * 3


def test_nothing_is_said_about_a_complete_state(tmp_path: Path) -> None:
    assert every(start(str(tmp_path), 2), "do", train, True) == [[((), [])] * 3] * 2
