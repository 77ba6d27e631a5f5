"""Plans what one rank saves, and keeps the plan between saves."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..storage.coding.rounded import Rounded
from ..storage.errors import StateError
from ..storage.format import values
from ..storage.format.manifest import path_text
from ..storage.limits import MAX_ROWS
from ..storage.runtime.clock import SYSTEM
from ..storage.runtime.gc_pause import uncollected
from .assignment import ChunkAssignment, GpuCoding, assign_chunks
from .derived_tensors import DerivedTensors
from .lossy import rounded_chunk
from .lossy.profiles import Lossy
from .objects import ObjectTree
from .planned_chunk import DeviceChunks, PlannedChunk, PlannedDerived
from .replica_groups import (
    Compared,
    ReplicaGroup,
    ReplicaGroups,
    ValueGroup,
    describes_part,
    shared_values,
    structure_group,
    value_groups,
)
from .shard_cache import ShardCache, TensorView
from .shard_rules import ShardRules
from .shards import Shard, check_memory
from .tree import boxes, show
from .tree_cache import StateCache
from .write_check import WriteCheck, copy_unguarded

if TYPE_CHECKING:
    import torch

MAX_VALUES = 64 << 20
"""Bytes of plain values that one rank may save."""


class Planner:
    """Keeps what one rank has planned between saves: most saves have the same tensors in the same memory, and the training waits
    for the plan. ``structure``: of the state; ``shards``: of its tensors. ``lossy``: the tensors that are rounded. ``compared``:
    what the ranks compare."""

    def __init__(self, lossy: Lossy | None = None, *, compared: Compared = "all") -> None:
        self.structure, self.shards, self.derived = StateCache(), ShardCache(), DerivedTensors()
        self._rules = ShardRules(lossy or Lossy({}))
        self._compared: Compared = compared
        self._groups: tuple[ChunkAssignment, ReplicaGroups] | None = None
        self._structure: tuple[ChunkAssignment, list[tuple[str, str]], ValueGroup] | None = None
        self._last: ChunkAssignment | None = None
        self._key: list[object] = []

    @uncollected()
    def divide(self, plan: SavePlan) -> ChunkAssignment:
        """Assign the chunks of a save. On the staging thread. ``StateError`` if a tensor's memory was freed."""
        for view in plan.views:  # the memory of a known tensor may have shrunk, at the same address
            check_memory(view.leaf, view.local, view.shard.reach)
        known = [view.shard for view in plan.views]
        sources = dict[int, int]()
        if self._compared != "whole":  # what is compared after a restore is not stored
            likeness = [k.likeness for k in known]
            sources = self.derived.of(likeness, lambda: plan.shards, plan.ready, save=plan.save, world_size=plan.world_size)
        key, last = [plan.gpus, *(shard.identity for shard in known)], self._last
        if last is not None and sources is last.sources and key == self._key:
            shards = last.shards
            for kept, view in zip(shards, plan.views, strict=True):
                kept.hold(view.leaf, view.local)
        else:
            shards, last = plan.shards, None
            self._rules.ask(shards)
        if self._rules.choose(shards, plan.ready) or last is None:
            last = assign_chunks(shards, sources, rank=plan.rank, world_size=plan.world_size, gpus=plan.gpus)
            self._last, self._key = last, key
        return last

    @uncollected()
    def groups(self, plan: SavePlan) -> list[ReplicaGroup]:
        """The tensors that this rank compares with others. On the staging thread."""
        if self._compared == "off" or not plan.division.held:
            return []
        if self._groups is None or self._groups[0] is not plan.division:
            held = plan.division.held
            self._groups = plan.division, ReplicaGroups(held, plan.rank, plan.world_size, plan.objects.buffers())
        return self._groups[1].of(plan.save, self._compared)

    def value_groups(self, plan: SavePlan) -> list[ValueGroup]:
        """The plain values that this rank compares with others, and the structure of its state."""
        if self._compared == "off" or plan.world_size == 1:
            return []
        values = shared_values(plan.values, plan.objects.own_paths())
        division, leaves = plan.division, [row[:2] for row in values if not describes_part(*row[1:])]
        if self._structure is None or self._structure[0] is not division or self._structure[1] != leaves:
            tensors = [(one.leaf.name, f"{path_text(one.leaf.path)} {one.kind}") for one in division.shards if not one.holders]
            self._structure = division, leaves, structure_group([*leaves, *tensors], plan.world_size)
        return [*value_groups(values, plan.world_size), self._structure[2]]

    def release(self) -> None:
        if self._last is not None:
            for shard in self._last.shards:
                shard.release()


@dataclass(frozen=True)
class SavePlan:
    """What one rank saves. Only the staging thread uses what is computed at first use.

    ``views``: its tensors. ``gpus``: what GPUs code. ``planner``: the same for all saves of this rank; ``save``: the
    number of the save, the same on all ranks. ``writes``: finds tensors that change before they are read. ``objects``: those of
    the state. ``made``: from when to when it was made, in monotonic seconds. The other properties are computed at first use,
    which is not on the training thread.
    """

    rank: int
    world_size: int
    views: tuple[TensorView, ...]
    values: tuple[tuple[str, str, str], ...]
    ready: Mapping[int, torch.cuda.Event]
    gpus: GpuCoding
    planner: Planner
    save: int
    writes: WriteCheck
    objects: ObjectTree
    made: tuple[float, float]

    @functools.cached_property
    def shards(self) -> tuple[Shard, ...]:
        return tuple(view.shard.with_elements(view.leaf, view.local) for view in self.views)

    @functools.cached_property
    def division(self) -> ChunkAssignment:
        return self.planner.divide(self)

    @property
    def parts(self) -> Mapping[int | None, DeviceChunks]:
        return self.division.parts

    @property
    def coverage(self) -> tuple[int, int]:
        return self.division.coverage

    @property
    def owned_dtensors(self) -> tuple[str, ...]:
        return self.division.owned_dtensors

    @property
    def plain_tensors(self) -> tuple[str, ...]:
        return self.division.plain_tensors

    @property
    def pieces(self) -> tuple[PlannedChunk, ...]:
        return tuple(piece for part in self.parts.values() for piece in part.pieces)

    @property
    def followers(self) -> tuple[PlannedDerived, ...]:
        return tuple(follower for part in self.parts.values() for follower in part.followers)

    @functools.cached_property
    def compared(self) -> tuple[Sequence[ReplicaGroup], Sequence[ValueGroup]]:
        """What this rank compares with others: tensors, and plain values."""
        return self.planner.groups(self), self.planner.value_groups(self)

    @property
    def chunks(self) -> int:
        """The number of chunks that this rank stores, also those that have no bytes of their own."""
        return sum(len(part.pieces) + len(part.followers) for part in self.parts.values())

    @property
    def text(self) -> int:
        """At least the characters of their names and paths: a path contains the parts of the name."""
        return 2 * sum(len(piece.name) for piece in (*self.pieces, *(follower.piece for follower in self.followers)))

    @property
    def nbytes(self) -> int:
        """Raw bytes that this rank stores."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def whole_bytes(self) -> int:
        """Bytes of all tensors of this rank."""
        return sum(view.shard.nbytes for view in self.views)

    @property
    def on_host(self) -> int:
        """Bytes of this rank's tensors in host memory."""
        return sum(view.shard.nbytes for view in self.views if view.shard.device is None)

    def rounded(self) -> dict[str, Rounded]:
        return {
            shard.leaf.name: rounded_chunk.check(shard.leaf.name, shard.rule, shard.findings.values())
            for shard in self.division.shards
            if shard.rule is not None and shard.findings
        }

    def find_derived(self) -> None:
        self.planner.derived.refresh(self.division.shards, self.ready, save=self.save, world_size=self.world_size)

    def changed(self) -> str:
        return self.writes.changed()

    def not_derived(self, follower: object) -> None:
        """Note that a chunk is not derived. If all ranks have the tensor, it stays planned until all look again."""
        assert isinstance(follower, PlannedDerived)
        if len(follower.piece.shard.holders or range(self.world_size)) == 1:
            self.planner.derived.forget(follower.piece.shard)

    def release(self) -> None:
        self.planner.release()


@uncollected()
def plan_save(
    state: object,
    *,
    rank: int,
    world_size: int,
    gpus: GpuCoding | None = None,
    planner: Planner | None = None,
    save: int = 1,
) -> SavePlan:
    """Plan a save, and copy tensors of the host that may change at once. ``gpus``: what GPUs code; None: the tensors in their
    memory. ``planner``: the same for all saves of a rank. ``save``: its number.

    Raises ``StateError`` with the path of anything that cannot be stored.
    """
    planner, objects, begun = planner or Planner(), ObjectTree(state, what="state"), SYSTEM.monotonic()
    tree = objects.saved(rank)
    with objects.named():
        views, rows = _leaves(planner, tree, rank)
    gpus = (gpus or GpuCoding()).suited([view.shard for view in views])
    ready = {
        device: _record_event(device) for device in {gpus.host, *(view.shard.device for view in views)} if device is not None
    }
    views, writes = copy_unguarded(views)
    return SavePlan(rank, world_size, views, rows, ready, gpus, planner, save, writes, objects, (begun, SYSTEM.monotonic()))


def tensors_of(state: object, rank: int) -> object:
    """Return a tree to prepare a save with. Of the objects in the state, only modules and optimizers are asked for theirs: a data
    loader may start its workers."""
    return ObjectTree(state, what="state").saved(rank, tensors_only=True)


def _leaves(planner: Planner, tree: object, rank: int) -> tuple[tuple[TensorView, ...], tuple[tuple[str, str, str], ...]]:
    """The tensors and the plain values of a state without objects."""
    leaves = planner.structure.leaves(tree)
    rows = tuple((leaf.name, path_text(leaf.path), values.dumps(leaf.value)) for leaf in leaves if not leaf.is_tensor)
    if sum(len(text) for _, _, text in rows) > MAX_VALUES:
        largest = max((leaf for leaf in leaves if not leaf.is_tensor), key=lambda leaf: len(values.dumps(leaf.value)))
        what = f"plain values take more than {MAX_VALUES >> 20} MiB"
        raise StateError(what, subject=show(largest.path), remedy="make it an array")
    if len(rows) > MAX_ROWS:
        (around, _), *_ = Counter(leaf.path[:-1] for leaf in leaves if not leaf.is_tensor).most_common(1)
        raise StateError(f"more than {MAX_ROWS:,} plain values", subject=show(around), remedy="make them an array")
    views = planner.shards.look([box for leaf in leaves if leaf.is_tensor for box in boxes(leaf)], rank)
    if len(views) + len(rows) > MAX_ROWS:
        what = f"has {len(views) + len(rows):,} tensors and plain values on this rank, and a node can store {MAX_ROWS:,}"
        raise StateError(what, subject="the state", remedy="stack small tensors")
    return views, rows


def _record_event(device: int) -> torch.cuda.Event:
    import torch

    return torch.cuda.current_stream(device).record_event()
