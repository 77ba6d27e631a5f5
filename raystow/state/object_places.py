"""Where the objects of a state are: finds them, puts other things in their places, and brings what was restored back."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ..storage.errors import StateError
from ..storage.format import values
from ..storage.versions.value_tree import part_text
from .box import Box, Boxes
from .per_rank import PerRank
from .rng import Rng
from .tree import Path, PathPart, Placeholder, is_tensor, not_a_dict, part_of, replace, show

_DEEPEST = 100


class ObjectPlace(NamedTuple):
    """An object of a state, or a value right below ``PerRank`` without objects. ``per_rank``: each rank has its own."""

    node: object
    per_rank: bool


def places(state: object, what: str) -> dict[Path, ObjectPlace]:
    """The objects of a state and its other values below ``PerRank``, by path.

    ``StateError`` for a state that is no dict, and for an object in two places.
    """
    if not isinstance(state, dict) or is_object(state):
        raise not_a_dict(state, what)
    found = dict[Path, ObjectPlace]()
    _find(state, (), found, per_rank=False, depth=0)
    first = dict[int, Path]()
    for path, (node, _) in found.items():
        if is_object(node) and first.setdefault(id(node), path) != path:
            there = f"is the object {show(first[id(node)], what)}, too"
            raise StateError(there, subject=show(path, what), remedy="name each object once")
    return found


def _find(node: object, path: Path, found: dict[Path, ObjectPlace], *, per_rank: bool, depth: int) -> None:
    if isinstance(node, PerRank):
        node, per_rank = node.value, True
    if is_object(node):
        found[path] = ObjectPlace(node, per_rank or isinstance(node, Rng))
    elif per_rank and not _has_objects(node, depth):
        found[path] = ObjectPlace(node, True)
    elif depth <= _DEEPEST and _may_have(node):
        for part, child in _parts(node):
            if per_rank or not _is_leaf(type(child)):
                _find(child, (*path, part), found, per_rank=per_rank, depth=depth + 1)


def _has_objects(node: object, depth: int) -> bool:
    if is_object(node) or isinstance(node, PerRank):
        return True
    return depth <= _DEEPEST and _may_have(node) and any(_has_objects(child, depth + 1) for _, child in _parts(node))


def _may_have(node: object) -> bool:
    """Whether a node is a container of more than leaves. The training waits for this: there may be 50,000."""
    if not isinstance(node, dict | list | tuple):
        return False
    kinds: set[type] = set(map(type, node.values() if isinstance(node, dict) else node))
    return not all(map(_is_leaf, kinds))


def _parts(node: object) -> Iterable[tuple[PathPart, object]]:
    """What is in a container, by the last part of its path."""
    if isinstance(node, dict):
        return node.items()
    assert isinstance(node, list | tuple)
    kind = "list" if isinstance(node, list) else "tuple"
    return [((kind, i), child) for i, child in enumerate(node)]


_leaves: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def _is_leaf(kind: type) -> bool:
    """Whether values of a class are neither containers nor objects."""
    found = _leaves.get(kind)
    if found is None:
        torch = sys.modules.get("torch")
        found = kind in values.PLAIN or issubclass(kind, np.ndarray | np.generic | Box | Boxes | Placeholder)
        found = _leaves[kind] = found or (torch is not None and issubclass(kind, torch.Tensor))
    return found


def is_object(node: object) -> bool:
    """Whether a node has ``state_dict`` and ``load_state_dict``. A dict or list of a class with both has more than its items."""
    if _is_leaf(type(node)) or type(node) in (dict, list, tuple) or isinstance(node, type | PerRank):
        return False
    return callable(getattr(node, "state_dict", None)) and callable(getattr(node, "load_state_dict", None))


def tensor_names(node: object, around: str = "") -> dict[int, str]:
    """The names of the tensors outside of objects by their ``id``."""
    node = node.value if isinstance(node, PerRank) else node
    if is_tensor(node):
        return {id(node): around}
    if is_object(node) or not isinstance(node, dict | list | tuple):
        return {}
    found = dict[int, str]()
    for part, child in _parts(node):
        found |= tensor_names(child, f"{around}.{part_text(part)}" if around else part_text(part))
    return found


def built(node: object, forms: Mapping[Path, object]) -> object:
    """``node`` with forms in the places of objects; the containers around them are copied."""
    return _built(node, forms, {path[:depth] for path in forms for depth in range(len(path))}, ())


def _built(node: object, forms: Mapping[Path, object], around: set[Path], path: Path) -> object:
    if path in forms:
        return forms[path]
    if isinstance(node, PerRank):
        node = node.value
    if path not in around:
        return node
    children = [(part, _built(child, forms, around, (*path, part))) for part, child in _parts(node)]
    if isinstance(node, dict):
        return dict(children)
    items = [child for _, child in children]
    return items if isinstance(node, list) else tuple(items)


def settled(node: object, restored: object, new: Mapping[Path, object], path: Path = ()) -> object:
    """``node`` with what was restored in its containers; ``new``: what takes the place of values below ``PerRank``."""
    if isinstance(node, PerRank):
        node.value = settled(node.value, restored, new, path)
        return node
    if restored is node or is_object(node):
        return node
    if path in new:
        return new[path]
    if isinstance(restored, Placeholder):
        return node
    if not isinstance(node, dict | list | tuple) or not isinstance(restored, dict | list | tuple) or len(restored) != len(node):
        return restored
    items = {part: settled(child, part_of(restored, (part,)), new, (*path, part)) for part, child in _parts(node)}
    return replace(node, {(part,): item for part, item in items.items() if item is not part_of(node, (part,))})
