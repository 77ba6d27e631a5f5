"""Weights or the state of the optimizer: what a tensor belongs to, by its name. One can be kept, or read, without the other."""

from __future__ import annotations

WEIGHTS, OPTIMIZER = "weights", "optimizer"

_OPTIMIZER = {"opt", "optim", "optimizer", "optimizers", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master"}


def group(name: str) -> str:
    """The optimizer's state, or the weights and all else."""
    return OPTIMIZER if _OPTIMIZER & set(name.lower().split(".")) else WEIGHTS
