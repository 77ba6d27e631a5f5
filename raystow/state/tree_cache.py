"""Keeps the structure of a state between saves: its containers, and the paths and names of its leaves.

The training waits while a state is flattened, and most saves have the same structure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ..storage.errors import StateError
from ..storage.format.rank_parts import rank_of
from .box import Box
from .dtensor_layout import is_dtensor
from .tree import Leaf, flatten, is_tensor, show


class StateCache:
    """The structure of one rank's state, without its leaves."""

    def __init__(self) -> None:
        self._root: _Container | None = None
        self._paths: list[object] = []
        self._names: list[str] = []
        self._tensors: list[bool] = []
        self._kinds: list[object] = []
        self._empty: list[int] = []  # indices of leaves that are empty containers

    def leaves(self, state: object) -> list[Leaf]:
        """The leaves as ``flatten`` returns them, with its errors."""
        found = list[object]()
        if self._root is not None and _gather(self._root, state, found) and self._fits(found):
            return list(map(Leaf._make, zip(self._paths, self._names, found, self._tensors, strict=True)))
        leaves = flatten(state)
        for leaf in leaves:
            if leaf.is_tensor and rank_of(leaf.path[-1]) is not None and not isinstance(leaf.value, Box):
                what = f"key {leaf.path[-1]!r} of a tensor is the name of one that a rank has for itself"
                raise StateError(what, subject=show(leaf.path[:-1]), remedy="use another key, or raystow.PerRank")
        self._root, found = _structure(state), []
        if not _gather(self._root, state, found) or list(map(id, found)) != [id(leaf.value) for leaf in leaves]:
            self._root = None  # a tensor consists of others, which may change between saves
            return leaves
        self._paths, self._names = [leaf.path for leaf in leaves], [leaf.name for leaf in leaves]
        self._tensors, self._kinds = [leaf.is_tensor for leaf in leaves], _kinds([leaf.value for leaf in leaves])
        self._empty = [i for i, leaf in enumerate(leaves) if _is_container(leaf.value)]
        return leaves

    def _fits(self, found: list[object]) -> bool:
        """Whether these are leaves, too: of the same classes as before, and containers among them still empty."""
        return _kinds(found) == self._kinds and not any(found[i] for i in self._empty)


class _Container(NamedTuple):
    """A container with content. ``keys``: of a dict its keys, in order, and their classes; of a list or tuple its length.
    ``children``: in the same order, None for a leaf; None if all are leaves."""

    kind: type
    keys: object
    children: tuple[_Container | None, ...] | None


def _kinds(values: list[object]) -> list[object]:
    """The class of each value, and of the local tensor of each DTensor."""
    kinds: list[object] = list(map(type, values))
    return kinds + [type(value._local_tensor) for value in values if is_dtensor(value)]


def _structure(node: object) -> _Container:
    children = tuple(_structure(child) if _is_container(child) and child else None for child in _children(node))
    return _Container(type(node), _keys(node), children if any(children) else None)


def _gather(known: _Container, node: object, found: list[object]) -> bool:
    """Add the leaves below a node to ``found``; False if its structure is another."""
    if type(node) is not known.kind or _keys(node) != known.keys:
        return False
    if known.children is None:
        found += _children(node)
        return True
    for child, value in zip(known.children, _children(node), strict=True):
        if child is None:
            found.append(value)
        elif not _gather(child, value, found):
            return False
    return True


def _keys(node: Any) -> object:
    return (tuple(node), tuple(map(type, node))) if isinstance(node, dict) else len(node)


def _children(node: Any) -> Iterable[object]:
    return node.values() if isinstance(node, dict) else node


def _is_container(node: object) -> bool:
    return isinstance(node, dict | list | tuple) and not is_tensor(node)
