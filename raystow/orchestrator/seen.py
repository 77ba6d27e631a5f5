"""Looks at the tensors of a state. Most are the same in every save, and the training waits for the look: so what was found out
about each is kept, and found again by what can be told at a glance."""

from __future__ import annotations

import sys
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

    def look(self, leaves: list[Leaf]) -> tuple[Sight, ...]:
        """At all these tensors; ``StateError`` as by ``shard_of``."""
        before, self._known = self._known, {}
        kinds = _Kinds()
        return tuple([self._look(leaf, before.get(leaf.name), kinds) for leaf in leaves])

    def _look(self, leaf: Leaf, before: tuple[Any, Shard] | None, kinds: _Kinds) -> Sight:
        found = kinds.marks(leaf)
        if found is None:
            shard = shard_of(leaf)
            return Sight(leaf, shard.local, shard)
        local, marks = found
        if before is None or before[0] != marks:
            before = marks, shard_of(leaf).without_elements()
        self._known[leaf.name] = before
        return Sight(leaf, local, before[1])


class _Kinds:
    """The usual kinds of tensors. Who has not imported torch saves arrays, and need not have it."""

    def __init__(self) -> None:
        torch, distributed = sys.modules.get("torch"), sys.modules.get("torch.distributed.tensor")
        self._plain = () if torch is None else (torch.Tensor, torch.nn.Parameter)
        self._distributed = None if distributed is None else distributed.DTensor

    def marks(self, leaf: Leaf) -> tuple[Any, tuple[Any, ...]] | None:
        """The elements that this rank holds of a tensor, and what tells it from others: as long as that is the same, so is its
        shard, but for what the elements are. None for what is no tensor of these kinds."""
        local, spread = leaf.value, None
        if type(local) is self._distributed:
            spread, local = (local.shape, local.placements, Mesh(local.device_mesh)), local._local_tensor
        if type(local) not in self._plain:
            return None
        try:
            where = local.get_device(), local.data_ptr(), local.stride(), local.is_conj(), local.is_neg()
        except RuntimeError:
            return None  # it does not lie in memory as other tensors do
        return local, (leaf.path, spread, local.dtype, local.shape, where)
