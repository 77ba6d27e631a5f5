"""Looks at the tensors of a state. Most are the same in every save, and the training waits for the look: so what was found out
about each is kept, and found again by what can be told at a glance."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from .placed import Mesh
from .shards import Shard, shard_of
from .state import Leaf


class Sight(NamedTuple):
    """A tensor, its elements that this rank holds, and its shard, which may be one of an earlier save and then holds none."""

    leaf: Leaf
    local: Any
    known: Shard


class Seen:
    """What one rank knows of its tensors from save to save, without the tensors themselves. On the training thread."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, Shard]] = {}
        self._marks: list[Any] = []  # of the last look, if no tensor was unusual
        self._shards: list[Shard] = []

    def look(self, leaves: Sequence[Leaf]) -> tuple[Sight, ...]:
        """At all these tensors; ``StateError`` as by ``shard_of``. There may be thousands: those of the last look are told from
        others all at once."""
        locals, marks = _glance(leaves)
        if marks == self._marks:  # as long as they are the same, so is the shard, but for what the elements are
            return tuple(map(Sight._make, zip(leaves, locals, self._shards, strict=True)))
        sights = self._find(leaves, locals, marks)
        usual = None not in marks  # the shards of others hold their elements
        self._marks, self._shards = (marks, [sight.known for sight in sights]) if usual else ([], [])
        return tuple(sights)

    def _find(self, leaves: Sequence[Leaf], locals: list[Any], marks: list[Any]) -> list[Sight]:
        before, self._known = self._known, {}
        sights = list[Sight]()
        for leaf, local, mark in zip(leaves, locals, marks, strict=True):
            if mark is None:
                shard = shard_of(leaf)
                sights.append(Sight(leaf, shard.local, shard))
                continue
            known = before.get(leaf.name)
            if known is None or known[0] != mark:
                known = mark, shard_of(leaf).without_elements()
            self._known[leaf.name] = known
            sights.append(Sight(leaf, local, known[1]))
        return sights


def _glance(leaves: Sequence[Leaf]) -> tuple[list[Any], list[Any]]:
    """This rank's part of each tensor, and what it is known again by; None of one that does not lie in memory as most do."""
    plain, distributed = _usual()
    values = [leaf.value for leaf in leaves]
    spread: list[Any] = [None] * len(values)
    if distributed is not None:
        for i, value in enumerate(values):
            if type(value) is distributed:
                spread[i], values[i] = (value.shape, value.placements, Mesh(value.device_mesh)), value._local_tensor
    marks = [
        _mark(leaf.path, over, value) if type(value) in plain else None
        for leaf, over, value in zip(leaves, spread, values, strict=True)
    ]
    return values, marks


def _mark(path: Any, spread: Any, local: Any) -> Any:
    try:
        where = local.get_device(), local.data_ptr(), local.shape, local.stride(), local.is_conj(), local.is_neg()
    except RuntimeError:  # it does not lie in memory as other tensors do
        return None
    return path, spread, local.dtype, where


def _usual() -> tuple[tuple[type, ...], type[Any] | None]:
    """The classes of plain tensors, and that of distributed ones. Who saves arrays need not have torch."""
    torch, distributed = sys.modules.get("torch"), sys.modules.get("torch.distributed.tensor")
    return () if torch is None else (torch.Tensor, torch.nn.Parameter), None if distributed is None else distributed.DTensor
