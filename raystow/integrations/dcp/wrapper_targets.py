"""What is read into tensors that consist of others, of which DCP knows nothing. It is as for ``raystow.restore``."""

from __future__ import annotations

from collections.abc import Collection

from torch.distributed.checkpoint.planner import LoadPlanner

from ...orchestrator.restore.name_match import is_within
from ...orchestrator.restore.planner import check_target, check_wrapper
from ...state.shards import Shard, shard_of
from ...state.tree import Leaf, boxes, flatten
from ...state.wrapper_tensors import ShardPart, WrapperText
from ...storage.errors import StateError
from ...storage.format import values
from ...storage.format.manifest import Chunk
from ...storage.versions.version import Version

_WHAT = "state_dict"


def wrapper_targets(version: Version, planner: LoadPlanner, keys: Collection[str]) -> list[tuple[Shard, list[Chunk]]]:
    """Return the inner tensors of the state at ``keys`` that have elements, with the chunks that they are filled from.

    Raises:
        StateError: The version has other tensors there.
    """
    leaves = flatten({key: planner.state_dict[key] for key in keys}, what=_WHAT)
    texts = {row.name: row.text for fragment in version.fragments for row in fragment.values} if leaves else {}
    _check_names(leaves, set(keys), version.chunks.keys() | texts.keys())
    targets = list[tuple[Shard, list[Chunk]]]()
    for leaf in leaves:
        if isinstance(leaf.value, WrapperText):
            check_wrapper(leaf, version, values.loads(texts[leaf.name]) if leaf.name in texts else None, what=_WHAT)
            continue
        if _is_nothing(leaf):
            continue
        chunks = version.chunks.get(leaf.name, [])
        for shard in (shard_of(box, what=_WHAT) for box in boxes(leaf, _WHAT)):
            check_target(leaf, shard, version, chunks[0], cast=False, what=_WHAT)
            targets.append((shard, chunks))
    return targets


def _check_names(leaves: list[Leaf], keys: set[str], saved: Collection[str]) -> None:
    names = {leaf.name for leaf in leaves if not _is_nothing(leaf)}
    others = {leaf.name.removesuffix(f".{leaf.path[-1]}") for leaf in leaves if isinstance(leaf.value, ShardPart)}
    extra = {name for name in saved if is_within(name, keys) and not is_within(name, others)} - names
    for title, found in (("in the state but not saved", names - {*saved}), ("saved but not in the state", extra)):
        if found:
            listed = ", ".join(sorted(found)[:10])
            raise StateError(
                f"{title}: {listed}", subject=_WHAT, remedy="pass tensors like those that were saved, in the same layout"
            )


def _is_nothing(leaf: Leaf) -> bool:
    return isinstance(leaf.value, ShardPart) and 0 in leaf.value.extent
