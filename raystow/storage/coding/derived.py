"""Tensors that follow from another one, bit for bit: a version stores the other one's bytes, and how to derive these.

In mixed precision weights are the optimizer's master copy, rounded; two names may stand for one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import dtypes
from .digest import raw_digest
from .kernels import Bytes

_ROUNDED = {("float32", "bfloat16"), ("float32", "float16")}


@dataclass(frozen=True, slots=True)
class Derivation:
    """Each element is the one of tensor ``source``, of this ``dtype``, in the same place: a copy, or rounded to the nearest
    number of the other dtype, ties to even."""

    source: str
    dtype: str


def derivable(source: str, dtype: str) -> bool:
    """Whether elements of ``dtype`` can be derived from those of the dtype ``source``."""
    return source == dtype or (source, dtype) in _ROUNDED


def derive(words: Bytes, source: str, dtype: str) -> Bytes:
    """The bytes (uint8) of the elements derived from the source's. A copy is the argument itself."""
    if source == dtype:
        return words
    with np.errstate(over="ignore", invalid="ignore"):  # numbers that are too large become infinite
        return words.view(dtypes.to_numpy(source)).astype(dtypes.to_numpy(dtype)).view(np.uint8)


def followed(raw: Bytes, words: Bytes, source: str, dtype: str) -> int | None:
    """Return the digest of ``raw`` if ``derive`` computes it from ``words`` on any machine, else None. Machines
    round NaNs differently, so nothing with a NaN is derived by rounding."""
    made = derive(words, source, dtype)
    if not np.array_equal(made, raw):
        return None
    if source != dtype and np.isnan(words.view(dtypes.to_numpy(source))).any():
        return None
    return raw_digest(made)
