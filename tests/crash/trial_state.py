"""The state that a trial's training has at a step: a few dtypes, weights and an optimizer, every byte from step and salt.

The salt tells a step that was trained again after a crash from the one that was lost: a version is either of them, never a
mixture.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

_FLOATS = (("embedding", np.float32, (160, 129)), ("norm", ml_dtypes.bfloat16, (257,)), ("head", np.float16, (300, 141)))
"""Some small, which one rank stores, and some large enough to be shared out: each rank has packs of both groups."""


def state_at(step: int, salt: int, *, rank: int) -> dict[str, Any]:
    """What one rank has: arrays alike on all, plain values of its own."""
    fixed, random = np.random.default_rng(1), np.random.default_rng([step, salt])

    def near(shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        """Much like that of any other step, so that saves are differences."""
        numbers = fixed.standard_normal(shape, np.float32).astype(dtype)
        word = np.dtype(f"u{numbers.itemsize}")
        return (numbers.view(word) + random.integers(0, 16, shape, word)).view(dtype)

    floats = {name: near(shape, dtype) for name, dtype, shape in _FLOATS}
    moments = {name: {moment: near(shape) for moment in ("exp_avg", "exp_avg_sq")} for name, _, shape in _FLOATS}
    return {
        "model": {**floats, "mask": random.integers(0, 2, 100).astype(bool), "nothing": np.zeros((0, 3), np.int64)},
        "optimizer": {"state": moments, "step": step, "lr": 0.1 / step},
        "loader": {"rank": rank, "salt": salt, "seen": random.integers(0, 2**62, 3)},
    }


def blank(*, rank: int) -> dict[str, Any]:
    """A state of the same shape, of a training that has not begun."""
    return state_at(1, 0, rank=rank)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two states are equal by their bytes, types and names."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    return type(a) is type(b) and bool(a == b)
