"""Compares ``into`` with the manifest of a version and plans what is read into each tensor. Changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...state.as_saved import AsSaved, CheckedAsSaved
from ...state.modules import BY_DICTS
from ...state.object_marker import ObjectMarker
from ...state.per_rank import RankStates
from ...state.shards import Shard, shard_of
from ...state.tree import Leaf, State, boxes, flatten, show
from ...state.wrapper_tensors import DESCRIPTION, WRAPPER, ShardPart, WrapperText
from ...storage.errors import StateError
from ...storage.format.boxes import bounds
from ...storage.format.manifest import SCALAR, Chunk, Value
from ...storage.format.selection import Sought
from ...storage.runtime.gc_pause import uncollected
from ...storage.versions.tensor_index import Seeker
from ...storage.versions.value_tree import Path as ValuePath
from ...storage.versions.value_tree import nested
from ...storage.versions.version import Version
from .fill import Fill
from .name_check import (
    ALONE,
    OtherRanks,
    check_filled,
    check_names,
    report_left_out,
    report_ranks,
    unused_names,
    wants_all_names,
)
from .name_match import NameMatch, match_names
from .name_patterns import STRICT, NameRules
from .numbers import element, number
from .plain_containers import plain_nodes
from .plan import FROM_STORE, RestorePlan, Sources, build
from .saved_parts import is_per_rank, load, seeks_every_rank, target

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RestoreOptions:
    """``names``: those that only one side may have, all others are an error. ``cast``: other dtypes are converted, else they are
    an error. ``part``: what restores is a part, which is rank 0 of 1. ``parts``: those that
    restore together with the ranks."""

    rank: int = 0
    world_size: int = 1
    names: NameRules = STRICT
    cast: bool = False
    part: str = ""
    parts: tuple[str, ...] = ()

    def seeker(self, version: Version) -> Seeker:
        """What seeks the rows of this rank or part."""
        return Seeker(self.rank, self.world_size, 1 if self.part else version.world_size, self.part)


@uncollected()
def plan_restore(
    version: Version,
    into: State,
    options: RestoreOptions = RestoreOptions(),
    *,
    sources: Sources = FROM_STORE,
    filled: Collection[str] = (),
    peers: OtherRanks = ALONE,
) -> RestorePlan:
    """Plan to fill ``into`` from ``version``. ``filled``: tensors that may hold another version's elements already. ``peers``:
    the other ranks, which are asked last, when all else is right.

    Raises ``StateError`` if a name, shape or dtype does not match, or if the version lacks a tensor of ``filled``.
    """
    leaves = flatten(into, what="into", placeholders=True)
    shards: dict[str, list[Shard] | StateError] = {}
    for leaf in leaves:
        if not _is_replaced(leaf):
            try:
                shards[leaf.name] = [shard_of(box, rank=options.rank, what="into") for box in boxes(leaf, "into")]
            except StateError as error:
                shards[leaf.name] = error  # raised only if the version holds a tensor of this name
    nodes, seeker = plain_nodes(leaves), options.seeker(version)
    finder = version.finder(seeker)
    spread = len(version.record.fragments) > 1
    sought = {leaf.name: _sought(leaf, shards.get(leaf.name), seeker, spread=spread) for leaf in leaves if leaf.is_tensor}
    found = finder.find(sought | {leaf.name: Sought(container=node.name) for node in nodes for leaf in node.leaves})
    check_filled(version, found, filled)
    divided = peers.alike and any(is_per_rank(leaf.value) for leaf in leaves)
    if wants_all_names(finder, seeker, options.names, divided=divided):
        finder.read_all()
    empty = {leaf.name for leaf in leaves if _is_empty_here(shards.get(leaf.name))}
    match = match_names(leaves, nodes, finder, seeker, empty=empty)
    unused = unused_names(match, finder, options.names)
    check_names(version, match, options.names, unused.names if peers.alike else (), peers.advice)
    fill = Fill(into, version.reader(turn=options.rank / options.world_size))
    fill.values |= match.new
    for leaf in leaves:
        chunks = found.chunks.get(leaf.name)
        if isinstance(leaf.value, AsSaved):
            if match.marked[leaf.path].parts:
                fill.values[leaf.path] = _as_saved(version, leaf, match, fill, options)
        elif isinstance(leaf.value, WrapperText):
            if leaf.path in match.new or leaf in match.whole:
                check_wrapper(leaf, version, fill.values.pop(leaf.path, None))
        elif leaf.path in match.new and leaf.name in shards:
            value = fill.values.pop(leaf.path)
            for shard in _targets(shards, leaf):
                fill.add_number(shard, element(value, shard, show(leaf.path, "into"), cast=options.cast))
        elif not chunks or leaf.path in match.new:
            continue
        elif leaf.is_tensor and not _is_replaced(leaf):
            for shard in () if leaf.name in empty and isinstance(leaf.value, ShardPart) else _targets(shards, leaf):
                check_target(leaf, shard, version, chunks[0], cast=options.cast)
                fill.add(shard, chunks)
        elif leaf.is_tensor or leaf in match.whole:
            saved = version.assemble(leaf.name, chunks)
            fill.values[leaf.path] = number(leaf.value, saved, chunks[0], show(leaf.path, "into"))
    names = frozenset(leaf.name for leaf in leaves if found.chunks.get(leaf.name))
    plan = build(fill.runs(), sources, version=version.id, names=names, execute=fill.run)
    if not peers.alike:
        check_names(version, match, options.names, peers.unused(unused), peers.advice)
    report_left_out(version, match, seeker, peers)
    report_ranks(version, match, found, seeker, options.names)
    return plan


def _is_replaced(leaf: Leaf) -> bool:
    """Whether the value is replaced in its container instead of filled in place."""
    return not leaf.is_tensor or isinstance(leaf.value, np.generic | AsSaved)


def _as_saved(version: Version, leaf: Leaf, match: NameMatch, fill: Fill, options: RestoreOptions) -> object:
    """What a marker is replaced by: plain values, and tensors that ``fill`` fills."""
    marker, taken = leaf.value, match.marked[leaf.path]
    assert isinstance(marker, AsSaved)
    parts = dict[ValuePath, object]()
    for within, part in taken.parts.items():
        if isinstance(part, Value):
            parts[within] = value = load(part)
            if within[-1:] == (DESCRIPTION,) and isinstance(value, str) and value.startswith(WRAPPER):
                subject = show((*leaf.path, *within[:-1]), "into")
                if isinstance(marker, ObjectMarker):
                    raise StateError("consists of tensors, and an object cannot be given it", subject=subject, remedy=BY_DICTS)
                what = "AsSaved cannot make a tensor that consists of others"
                raise StateError(what, subject=subject, remedy="pass one like the one that was saved")
            continue
        first = part[0]
        own = None if taken.merges or first.kind == SCALAR else marker._memory(within, first.dtype, first.shape)
        parts[within] = made = own if own is not None else target(version, part, marker._device(within[taken.merges :]))
        if isinstance(made, np.generic):
            continue
        place = Leaf((*leaf.path, *within), first.name, made, True)
        for shard in [shard_of(box, rank=options.rank, what="into") for box in boxes(place, "into")]:
            check_target(place, shard, version, first, cast=options.cast)
            fill.add(shard, part)
    whole = nested(parts)
    if taken.merges:
        assert isinstance(whole, dict)
        whole = RankStates(tuple(whole.get(rank) for rank in range(version.world_size)))
    marker._check(whole)
    return whole


def check_wrapper(leaf: Leaf, version: Version, saved: object, *, what: str = "into") -> None:
    """``StateError`` unless a tensor that consists of others is described as the one that was saved."""
    if leaf.value != saved:
        differ = f"is {leaf.value}, but version {version.id} holds {saved!r:.1000}"
        raise StateError(differ, subject=show(leaf.path[:-1], what), remedy="pass a tensor like the one that was saved")


def _is_empty_here(targets: list[Shard] | StateError | None) -> bool:
    """Whether other ranks have all elements of a tensor; those may be of another class, which consists of tensors."""
    return isinstance(targets, list) and bool(targets) and all(0 in one.extent and 0 not in one.shape for one in targets)


def _sought(leaf: Leaf, targets: list[Shard] | StateError | None, seeker: Seeker, *, spread: bool) -> Sought:
    """What is sought for a leaf. ``spread``: the manifest has several fragments, of which some may not be needed."""
    if isinstance(leaf.value, CheckedAsSaved):
        return Sought(container=leaf.name)
    if is_per_rank(leaf.value):
        every = seeks_every_rank(leaf.value, seeker)
        return Sought(beneath=True, own=not every, every=every)
    if isinstance(leaf.value, AsSaved):
        like = leaf.value._like() if spread else {}
        parts = [boxes(Leaf(leaf.path, f"{leaf.name}.{name}", one, True), "into") for name, one in like.items()]
        found = {within[0].name: [shard_of(box, rank=seeker.rank, what="into") for box in within] for within in parts}
        return Sought(beneath=True, like={name: _sought_box(shards) for name, shards in found.items()})
    if isinstance(targets, list) and targets:
        return _sought_box(targets)
    return Sought(tensor=leaf.is_tensor)


def _sought_box(targets: Sequence[Shard]) -> Sought:
    """What is sought of a tensor for these parts of it."""
    around = bounds([(shard.offset, shard.extent) for shard in targets])
    return Sought(True, targets[0].shape, around, targets[0].holders)


def _targets(shards: Mapping[str, list[Shard] | StateError], leaf: Leaf) -> list[Shard]:
    """The targets of a leaf; none of one that is replaced. Raises the error of a leaf that cannot be one."""
    targets = shards.get(leaf.name, [])
    if isinstance(targets, StateError):
        raise targets
    return targets


def check_target(leaf: Leaf, shard: Shard, version: Version, saved: Chunk, *, cast: bool, what: str = "into") -> None:
    """``StateError`` if a tensor or array cannot be filled from ``saved``."""
    if shard.shape != saved.shape or (shard.dtype != saved.dtype and not cast):
        differ = f"is {shard.dtype} {shard.shape}, but version {version.id} holds {saved.dtype} {saved.shape}"
        raise StateError(differ, subject=show(leaf.path, what), remedy="" if shard.shape != saved.shape else "cast=True converts")
