"""The outline of a state: its containers, and what its leaves are called. It is the same in most saves, and the training waits
while a state is taken apart: so it is kept, and no name is put together twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from .state import Leaf, flatten, is_tensor


class Outline:
    """What one rank knows of its state from save to save, without what is in it."""

    def __init__(self) -> None:
        self._root: _Container | None = None
        self._paths: list[Any] = []
        self._names: list[str] = []
        self._tensors: list[bool] = []
        self._kinds: list[type] = []
        self._empty: list[int] = []  # the numbers of leaves that are empty containers

    def leaves(self, state: Any) -> list[Leaf]:
        """As ``flatten`` gives them, with its errors."""
        found = list[Any]()
        if self._root is not None and _gather(self._root, state, found) and self._fits(found):
            return list(map(Leaf._make, zip(self._paths, self._names, found, self._tensors, strict=True)))
        leaves = flatten(state)
        self._root = _outline(state)
        self._paths, self._names = [leaf.path for leaf in leaves], [leaf.name for leaf in leaves]
        self._tensors, self._kinds = [leaf.is_tensor for leaf in leaves], [type(leaf.value) for leaf in leaves]
        self._empty = [i for i, leaf in enumerate(leaves) if _is_container(leaf.value)]
        return leaves

    def _fits(self, found: list[Any]) -> bool:
        """Whether these are leaves, too: each of the class of the one before it, and no container among them full."""
        return list(map(type, found)) == self._kinds and not any(found[i] for i in self._empty)


class _Container(NamedTuple):
    """One that holds something. ``keys``: those of a dict, in its order, and their classes; of a list or tuple, its length.
    ``children``: in the same order, None for a leaf; or None if all are leaves."""

    kind: type
    keys: Any
    children: tuple[_Container | None, ...] | None


def _outline(node: Any) -> _Container:
    children = tuple(_outline(child) if _is_container(child) and child else None for child in _children(node))
    return _Container(type(node), _keys(node), children if any(children) else None)


def _gather(known: _Container, node: Any, found: list[Any]) -> bool:
    """Add the leaves below a node to ``found``; false if it has another outline."""
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


def _keys(node: Any) -> Any:
    return (tuple(node), tuple(map(type, node))) if isinstance(node, dict) else len(node)


def _children(node: Any) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node


def _is_container(node: Any) -> bool:
    return isinstance(node, dict | list | tuple) and not is_tensor(node)
