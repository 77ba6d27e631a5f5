"""The state of a training after each step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def training(seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the state after each training step: bf16 weights, their master copy, moments and a counter."""
    torch.manual_seed(seed)
    master, step = torch.randn(600, 500), torch.zeros(())
    moment = torch.randn(600, 500)
    while True:
        yield {
            "model": {"w": master.bfloat16()},
            "optim": {"master": master.clone(), "exp_avg": moment.clone(), "exp_avg_sq": moment.square(), "step": step.clone()},
        }
        moment = 0.9 * moment + 0.1 * torch.randn(600, 500)
        master, step = master - 1e-4 * moment, step + 1
