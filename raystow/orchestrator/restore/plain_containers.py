"""Containers of plain values in ``into``: each is replaced whole by what the version has, so it may have grown or be of another
kind.

A container is plain if neither ``into`` nor the version has a tensor in it. In other containers each value is matched by its
name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...state.tree import Leaf, Path
from ...storage.format.manifest import Value, parse_path, path_text
from ...storage.versions.value_tree import container, containers, rows_of_one_rank


@dataclass(frozen=True)
class PlainNode:
    """A plain value of ``into``, or a container without tensors. ``leaves``: the values in it."""

    path: Path
    name: str
    leaves: tuple[Leaf, ...]

    @property
    def is_leaf(self) -> bool:
        return self.leaves[0].path == self.path

    def children(self) -> list[PlainNode]:
        """The values and containers right in this container."""
        return _nodes(self.leaves, lambda leaf: len(self.path) + 1)


@dataclass
class ValueMatch:
    """``values``: what replaces nodes of ``into``, by path. ``rows``: those that these are made of, of one rank in each node.
    ``used``: their names, and those that other ranks have in the same containers. ``missing``: values of ``into`` that the
    version lacks."""

    values: dict[Path, object] = field(default_factory=dict)
    rows: list[Value] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    missing: list[Leaf] = field(default_factory=list)


def plain_nodes(leaves: Sequence[Leaf]) -> list[PlainNode]:
    """The plain values of ``into``, by the outermost containers below its root without tensors."""
    with_tensors = set[Path]()
    for leaf in leaves:
        around = leaf.path[:-1] if leaf.is_tensor else ()
        while around and around not in with_tensors:
            with_tensors.add(around)
            around = around[:-1]

    def depth(leaf: Leaf) -> int:
        return next(n for n in range(1, len(leaf.path) + 1) if leaf.path[:n] not in with_tensors)

    return _nodes([leaf for leaf in leaves if not leaf.is_tensor], depth)


def by_container(rows: Iterable[Value]) -> dict[str, list[Value]]:
    """Value rows by the name of each container around them, and by their own name."""
    found = defaultdict[str, list[Value]](list)
    for row in rows:
        for name in containers(parse_path(row.path)):
            found[name].append(row)
    return found


def is_same(node: PlainNode, found: Mapping[str, Value], around: Mapping[str, Sequence[Value]]) -> bool:
    """Whether the version has just the values of a node, so that it makes no difference whether it is replaced whole."""
    rows = {leaf.name: found.get(leaf.name) for leaf in node.leaves}
    same = all((row := rows[leaf.name]) is not None and row.path == path_text(leaf.path) for leaf in node.leaves)
    return same and len(around.get(node.name, ())) == len(node.leaves)


def match_values(
    nodes: Iterable[PlainNode], around: Mapping[str, Sequence[Value]], tensors: Collection[str], rank: int
) -> ValueMatch:
    """Match nodes with the values of a rank. ``tensors``: the names of all tensors that only the version has, and of the
    containers around them."""
    match = ValueMatch()
    for node in nodes:
        rows = rows_of_one_rank(around.get(node.name, ()), rank)
        is_value = node.is_leaf and [row.name for row in rows] == [node.name]
        if rows and (is_value or node.name not in tensors):
            match.values[node.path] = container(node.name, rows)
            match.rows += rows
            match.used.update(row.name for row in around[node.name])
        elif node.is_leaf:
            match.missing.extend(node.leaves)
        else:
            inner = match_values(node.children(), around, tensors, rank)
            match.values |= inner.values
            match.rows += inner.rows
            match.used |= inner.used
            match.missing += inner.missing
    return match


def _nodes(leaves: Iterable[Leaf], depth: Callable[[Leaf], int]) -> list[PlainNode]:
    found = defaultdict[Path, list[Leaf]](list)
    for leaf in leaves:
        found[leaf.path[: depth(leaf)]].append(leaf)
    return [PlainNode(path, _name(path, inside[0]), tuple(inside)) for path, inside in found.items()]


def _name(path: Path, leaf: Leaf) -> str:
    return leaf.name if len(path) == len(leaf.path) else list(containers(path))[-1]
