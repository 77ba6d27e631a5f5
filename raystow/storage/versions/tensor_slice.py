"""Indices of a part of a tensor: integers, slices with positive steps, and ``...``."""

from __future__ import annotations

from types import EllipsisType
from typing import Any

import numpy as np

from ..errors import StateError

Index = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]


def resolved(
    index: Index | None, shape: tuple[int, ...], name: str
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int | slice, ...]]:
    """The smallest box that contains what ``index`` selects, and the index to apply to it."""
    parts: list[Any] = [] if index is None else list(index) if isinstance(index, tuple) else [index]
    if any(type(p) is not int and not isinstance(p, slice | EllipsisType | np.integer) for p in parts):
        raise StateError("an index is made of integers, slices and '...'", subject=name)
    if parts.count(...) > 1 or len(parts) - parts.count(...) > len(shape):
        raise StateError(f"index {index!r} does not fit shape {shape}", subject=name)
    where = parts.index(...) if ... in parts else len(parts)
    missing = len(shape) - (len(parts) - parts.count(...))
    parts[where : where + 1] = [slice(None)] * missing
    offset: list[int] = []
    extent: list[int] = []
    rest: list[int | slice] = []
    keep: int | slice
    for part, length in zip(parts, shape, strict=True):
        try:
            selected = range(length)[part]
        except IndexError:
            raise StateError(f"index {part} is out of range for size {length}", subject=name) from None
        except (TypeError, ValueError) as error:
            raise StateError(f"{part!r} is not a slice of integers: {error}", subject=name) from error
        if isinstance(selected, int):
            selected, keep = range(selected, selected + 1), 0
        elif selected.step < 1:
            raise StateError("steps must be positive", subject=name)
        else:
            keep = slice(None, None, selected.step)
        offset.append(selected.start)
        extent.append(max(0, selected.stop - selected.start))
        rest.append(keep)
    return tuple(offset), tuple(extent), tuple(rest)
