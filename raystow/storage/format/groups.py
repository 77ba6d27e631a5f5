"""The group of a tensor or value, by its name: weights, optimizer state or parts. One can be kept or read without the others."""

from __future__ import annotations

from .parts import part_of

WEIGHTS, OPTIMIZER, PARTS = "weights", "optimizer", "parts"

_OPTIMIZER = {"opt", "optim", "optimizer", "optimizers", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master"}


def group(name: str) -> str:
    """``PARTS``, ``OPTIMIZER`` or ``WEIGHTS``."""
    if part_of(name):
        return PARTS
    return OPTIMIZER if _OPTIMIZER & set(name.lower().split(".")) else WEIGHTS
