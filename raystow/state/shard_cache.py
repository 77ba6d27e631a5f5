"""Keeps the shards of a state between saves. Most tensors are the same in every save, and the training waits for this.

A tensor is recognized by its class, dtype, shape, strides, address and placement.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .box import Box
from .dtensor_layout import MeshKey
from .shards import Shard, shard_of
from .tree import Elements, Leaf, Path

if TYPE_CHECKING:
    import torch


class TensorView(NamedTuple):
    """A tensor, this rank's elements of it, and its shard. A shard that is kept from an earlier save has no elements."""

    leaf: Leaf
    local: Elements
    shard: Shard


class ShardCache:
    """The shards of one rank's tensors, without elements. Used on the training thread."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, object], tuple[object, Shard]] = {}
        self._marks: list[object] = []  # of the last save, if every tensor could be recognized
        self._shards: list[Shard] = []

    def look(self, leaves: Sequence[Leaf], rank: int = 0) -> tuple[TensorView, ...]:
        """A view of each tensor or box; ``StateError`` as by ``shard_of``. Thousands of unchanged tensors are
        recognized by one comparison."""
        locals, marks = _glance(leaves)
        if marks == self._marks:  # equal marks mean equal shards, except for the elements
            return tuple(map(TensorView._make, zip(leaves, locals, self._shards, strict=True)))
        views = self._find(leaves, locals, marks, rank)
        usual = None not in marks  # shards of other tensors have elements
        self._marks, self._shards = (marks, [view.shard for view in views]) if usual else ([], [])
        return tuple(views)

    def _find(
        self, leaves: Sequence[Leaf], locals: Sequence[torch.Tensor], marks: Sequence[object], rank: int
    ) -> list[TensorView]:
        before, self._known = self._known, {}
        views = list[TensorView]()
        for leaf, local, mark in zip(leaves, locals, marks, strict=True):
            if mark is None:
                shard = shard_of(leaf, rank=rank)
                views.append(TensorView(leaf, shard.local, shard))
                continue
            of = leaf.name, leaf.value.box if isinstance(leaf.value, Box) else None
            known = before.get(of)
            if known is None or known[0] != mark:
                known = mark, shard_of(leaf, rank=rank).without_elements()
            self._known[of] = known
            views.append(TensorView(leaf, local, known[1]))
        return views


def _glance(leaves: Sequence[Leaf]) -> tuple[list[torch.Tensor], list[object]]:
    """Return this rank's part of each tensor, and a mark by which to recognize it; None for a tensor without plain memory."""
    loaded, distributed = sys.modules.get("torch"), sys.modules.get("torch.distributed.tensor")  # not imported for other states
    plain = () if loaded is None else (loaded.Tensor, loaded.nn.Parameter)
    values: list[torch.Tensor] = [leaf.value for leaf in leaves]
    spread: list[object] = [None] * len(values)
    for i, value in enumerate(values):
        if isinstance(value, Box):
            spread[i], values[i] = (value.shape, value.offset, value.ranks), value.local
    if distributed is not None:
        for i, value in enumerate(values):
            if type(value) is distributed.DTensor:
                spread[i], values[i] = (value.shape, value.placements, MeshKey(value.device_mesh)), value._local_tensor
    marks = [
        _mark(leaf.path, over, value) if type(value) in plain else None
        for leaf, over, value in zip(leaves, spread, values, strict=True)
    ]
    return values, marks


def _mark(path: Path, spread: object, local: torch.Tensor) -> object:
    try:
        where = local.get_device(), local.data_ptr(), local.shape, local.stride(), local.is_conj(), local.is_neg()
    except RuntimeError:  # it has no plain memory
        return None
    return path, spread, local.dtype, where
