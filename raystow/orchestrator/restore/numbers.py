"""Plain numbers as tensors and arrays without dimensions, and back: each may have been saved where ``into`` has the other."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np

from ...state.shards import Shard
from ...state.tree import Elements
from ...storage.coding.kernels import Words
from ...storage.errors import StateError
from ...storage.format import manifest
from ...storage.format.manifest import Chunk

if TYPE_CHECKING:
    import torch

_NUMBERS = (bool, int, float, complex)


def element(value: object, shard: Shard, where: str, *, cast: bool) -> Elements:
    """A saved plain value as an element of the dtype of a target, in host memory. ``where``: names the target in errors.

    ``StateError`` if it is not a number, if the target has dimensions, or if its dtype does not have exactly this number, unless
    ``cast``: then torch or numpy converts it.
    """
    if not isinstance(value, _NUMBERS) or shard.shape:
        kind = "None" if value is None else f"a {type(value).__name__}"
        saved = f"the number {_text(value)}" if isinstance(value, _NUMBERS) else kind
        what = f"is {shard.dtype} {shard.shape}, but the version holds {saved}"
        raise StateError(what, subject=where, remedy="put a plain value there instead, such as None: it is replaced")
    try:
        wide = np.array(value, _wide(value))
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # the numbers are compared
            found = wide.astype(shard.local.dtype) if isinstance(shard.local, np.ndarray) else _tensor(wide, shard.local)
        if cast or _same(found.item(), value):
            return found
        error = None
    except (TypeError, ValueError, OverflowError, RuntimeError, NotImplementedError) as caught:
        error = caught
    remedy = "" if cast else "cast=True converts, or put a plain number there: it is replaced"
    what = f"is {shard.dtype}, which does not have the saved number {_text(value)}"
    raise StateError(what, subject=where, remedy=remedy) from error


def number(leaf_value: object, saved: object, chunk: Chunk, where: str) -> object:
    """What replaces a leaf of ``into`` that is not filled, where a tensor or array was saved: for a number, a number.

    ``StateError`` if the leaf is a number and ``saved`` has dimensions.
    """
    is_scalar = isinstance(leaf_value, np.generic)
    if not is_scalar and type(leaf_value) not in _NUMBERS:
        return saved
    if chunk.shape:
        what = f"is a number, but the version holds {chunk.dtype} {chunk.shape}"
        raise StateError(what, subject=where, remedy="put a tensor of this shape there, or None: it is replaced")
    return saved if is_scalar and chunk.kind == manifest.SCALAR else saved.item()  # type: ignore[attr-defined]


def _text(value: complex) -> str:
    """A number in errors; Python refuses to write very long ones in decimal digits."""
    return f"{value:#x}"[:40] if isinstance(value, int) and value.bit_length() > 128 else str(value)


def _wide(value: complex) -> str:
    """The widest dtype for a number."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int64" if -(1 << 63) <= value < 1 << 63 else "uint64" if 0 <= value < 1 << 64 else "float64"
    return "float64" if isinstance(value, float) else "complex128"


def _tensor(wide: Words, like: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.from_numpy(wide).to(like.dtype)


def _same(found: complex, value: complex) -> bool:
    """Whether two numbers are equal; every NaN is equal to every other."""
    if found == value:
        return True
    parts = (found.real, value.real), (found.imag, value.imag)
    return all(a == b or (a != a and b != b) for a, b in parts)
