"""The group of a tensor or value, by its name: weights or optimizer state. One can be kept or read without the other."""

from __future__ import annotations

WEIGHTS, OPTIMIZER = "weights", "optimizer"

_OPTIMIZER = {"opt", "optim", "optimizer", "optimizers", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master"}


def group(name: str) -> str:
    """``OPTIMIZER`` or ``WEIGHTS``."""
    return OPTIMIZER if _OPTIMIZER & set(name.lower().split(".")) else WEIGHTS
