"""Looks at the tensors of a state. Most are the same in every save, and the training waits for the look: so what was found out
about each is kept, and found again by what can be told at a glance."""

from __future__ import annotations

import sys
from collections.abc import Iterable
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

    def look(self, leaves: Iterable[Leaf]) -> tuple[Sight, ...]:
        """At all these tensors; ``StateError`` as by ``shard_of``. One loop without a call for each: there may be thousands."""
        before, self._known = self._known, {}
        plain, distributed = _usual()
        sights = list[Sight]()
        for leaf in leaves:
            path, name, local, _ = leaf
            spread = None
            if type(local) is distributed:
                spread, local = (local.shape, local.placements, Mesh(local.device_mesh)), local._local_tensor
            if type(local) not in plain:
                sights.append(_unusual(leaf))
                continue
            try:
                where = local.get_device(), local.data_ptr(), local.shape, local.stride(), local.is_conj(), local.is_neg()
            except RuntimeError:  # it does not lie in memory as other tensors do
                sights.append(_unusual(leaf))
                continue
            marks, known = (path, spread, local.dtype, where), before.get(name)
            if known is None or known[0] != marks:  # as long as they are the same, so is the shard, but for what the elements are
                known = marks, shard_of(leaf).without_elements()
            self._known[name] = known
            sights.append(Sight(leaf, local, known[1]))
        return tuple(sights)


def _usual() -> tuple[tuple[type, ...], type[Any] | None]:
    """The classes of plain tensors, and that of distributed ones. Who saves arrays need not have torch."""
    torch, distributed = sys.modules.get("torch"), sys.modules.get("torch.distributed.tensor")
    return () if torch is None else (torch.Tensor, torch.nn.Parameter), None if distributed is None else distributed.DTensor


def _unusual(leaf: Leaf) -> Sight:
    shard = shard_of(leaf)
    return Sight(leaf, shard.local, shard)
