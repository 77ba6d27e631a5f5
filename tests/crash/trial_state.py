"""The state of a trial's training at a step: several dtypes, weights and an optimizer; step and salt determine every byte.

The salt distinguishes a step that was trained again after a crash from the lost one: a version must be one of them, never a
mixture.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

_FLOATS = (("embedding", np.float32, (160, 129)), ("norm", ml_dtypes.bfloat16, (257,)), ("head", np.float16, (300, 141)))
"""Some small, which one rank stores, and some large enough to be shared out: each rank has packs of both groups."""
PART_RANK = 1000
"""Instead of a rank, in the state of a part."""


def state_at(step: int, salt: int, *, rank: int) -> dict[str, Any]:
    """Return the state of one rank: arrays equal on all ranks, and plain values of its own."""
    fixed, random = np.random.default_rng(1), np.random.default_rng([step, salt])

    def near(shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        """Return an array close to that of any other step, so that saves become deltas."""
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
    """Return a state of the same shape, of step 1 with salt 0."""
    return state_at(1, 0, rank=rank)


def same_bits(a: Any, b: Any) -> bool:
    """Return whether two states are equal in bytes, types and names."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    return type(a) is type(b) and bool(a == b)
