"""Compares ``into`` with the manifest of a version and plans what is read into each tensor. Changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ...storage.errors import StateError
from ...storage.format import values
from ...storage.format.boxes import bounds
from ...storage.format.manifest import Chunk
from ...storage.format.selection import Sought
from ...storage.gc_pause import uncollected
from ...storage.tensor_index import Seeker
from ...storage.version import Version
from ..save.shards import Shard, overlaps, shard_of
from ..save.state_tree import Leaf, State, boxes, flatten, show
from .fill import Fill
from .name_check import check_filled, check_names
from .plan import FROM_STORE, RestorePlan, Sources, build

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RestoreOptions:
    """``strict``: names that only one side has are an error, else they are left alone. ``cast``: other dtypes are converted, else
    they are an error."""

    rank: int = 0
    world_size: int = 1
    strict: bool = True
    cast: bool = False


@uncollected()
def plan_restore(
    version: Version,
    into: State,
    options: RestoreOptions = RestoreOptions(),
    *,
    sources: Sources = FROM_STORE,
    filled: Collection[str] = (),
) -> RestorePlan:
    """Plan to fill ``into`` from ``version``. ``filled``: tensors that may hold another version's elements already.

    Raises ``StateError`` if a name, shape or dtype does not match, or if the version lacks a tensor of ``filled``.
    """
    leaves = flatten(into, what="into")
    shards: dict[str, list[Shard] | StateError] = {}
    for leaf in leaves:
        if not _is_replaced(leaf):
            try:
                shards[leaf.name] = [shard_of(box, rank=options.rank, what="into") for box in boxes(leaf)]
            except StateError as error:
                shards[leaf.name] = error  # raised only if the version holds a tensor of this name
    finder = version.finder(Seeker(options.rank, options.world_size, version.world_size))
    found = finder.find({leaf.name: _sought(leaf, shards.get(leaf.name)) for leaf in leaves})
    check_filled(version, found, filled)
    check_names(version, finder, {leaf.name for leaf in leaves}, strict=options.strict, warn=options.rank == 0)
    fill = Fill(into, version.reader(turn=options.rank / options.world_size))
    for leaf in leaves:
        chunks = found.chunks.get(leaf.name)
        if leaf.name in found.values and not (leaf.is_tensor and chunks):
            value = values.loads(found.values[leaf.name].text)
            if not (isinstance(value, dict | list | tuple) and isinstance(leaf.value, type(value))):  # else both are empty
                fill.values[leaf.path] = value
        elif chunks and _is_replaced(leaf):
            fill.values[leaf.path] = version.assemble(leaf.name, chunks)
        elif chunks:
            targets = shards[leaf.name]
            if isinstance(targets, StateError):
                raise targets
            for shard in targets:
                _check_target(leaf, shard, version, chunks[0], cast=options.cast)
                fill.add(shard, chunks)
    return build(fill.runs(), sources, version=version.id, names=frozenset(found.chunks), execute=fill.run)


def _is_replaced(leaf: Leaf) -> bool:
    """Whether the value is replaced in its container instead of filled in place."""
    return not leaf.is_tensor or isinstance(leaf.value, np.generic)


def _sought(leaf: Leaf, targets: list[Shard] | StateError | None) -> Sought:
    if isinstance(targets, list) and targets:
        around = bounds([(shard.offset, shard.extent) for shard in targets])
        return Sought(True, targets[0].shape, around, targets[0].holders)
    return Sought(tensor=leaf.is_tensor)


def _check_target(leaf: Leaf, shard: Shard, version: Version, saved: Chunk, *, cast: bool) -> None:
    where = show(leaf.path, "into")
    if isinstance(shard.bits, np.ndarray) and isinstance(leaf.value, np.ndarray) and not leaf.value.flags.writeable:
        raise StateError("the array is read-only", subject=where)
    if overlaps(shard.local):
        raise StateError("elements share memory", subject=where, remedy="give it memory of its own: clone() it")
    if shard.shape != saved.shape or (shard.dtype != saved.dtype and not cast):
        what = f"is {shard.dtype} {shard.shape}, but version {version.id} holds {saved.dtype} {saved.shape}"
        raise StateError(what, subject=where, remedy="" if shard.shape != saved.shape else "cast=True converts")
