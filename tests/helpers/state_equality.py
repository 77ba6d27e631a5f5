"""Compares states, and versions with states, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

import raystow
from raystow.storage.versions.version import Version


def same(a: Any, b: Any) -> bool:
    """Return whether two states have the same types, containers and bits."""
    if isinstance(a, dict):
        return type(b) is dict and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, DTensor):
        return a._spec == b._spec and same(a._local_tensor, b._local_tensor)
    if isinstance(a, torch.Tensor):
        same_form = isinstance(b, torch.Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape)
        return same_form and torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (a, b)))
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    return type(a) is type(b) and repr(a) == repr(b)


def restores(version: Version, state: dict[str, Any]) -> bool:
    """Return whether a version restores these nested dicts of tensors."""
    into = _blank(state)
    raystow.restore(version, into)
    return same(into, state)


def _blank(state: dict[str, Any]) -> dict[str, Any]:
    return {name: _blank(part) if isinstance(part, dict) else torch.zeros_like(part) for name, part in state.items()}
