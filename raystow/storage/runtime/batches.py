"""Divides items into batches of limited size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_Item = TypeVar("_Item")


def batches(items: Iterable[_Item], nbytes: Callable[[_Item], int], limit: int) -> Iterator[list[_Item]]:
    """Yield the items, in order, in lists of at most ``limit`` bytes or of a single item."""
    batch, used = list[_Item](), 0
    for item in items:
        size = nbytes(item)
        if batch and used + size > limit:
            yield batch
            batch, used = [], 0
        batch.append(item)
        used += size
    if batch:
        yield batch
