"""A training state as a flat list of leaves with paths, and back. Defines what a state may contain and how leaves are named."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ..storage.coding.kernels import Words
from ..storage.errors import StateError
from ..storage.format import values
from ..storage.format.manifest import path_text
from ..storage.limits import MAX_NAME
from .box import Box, Boxes
from .dtensor_layout import dtensor_boxes, is_dtensor
from .wrapper_tensors import WrapperText, inner_tensors, unwrapped

if TYPE_CHECKING:
    import torch

BY_METHODS = "give its class state_dict() and load_state_dict()"
"""A remedy for values outside of objects."""
_DEEPEST = 100  # containers around a leaf, far below Python's recursion limit
_SIMPLE = (np.ndarray, np.memmap)
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple}
_LONG = MAX_NAME // 16  # characters of a name; the path of a shorter one, whose characters JSON may escape, fits the format

State: TypeAlias = dict[str, Any]
"""A training state: a dict with string or integer keys of tensors, plain values, and dicts, lists and tuples of these."""

Elements: TypeAlias = "torch.Tensor | Words"
"""The elements of one tensor that one rank has."""

PathPart: TypeAlias = str | int | tuple[str, int]
Path: TypeAlias = tuple[PathPart, ...]
"""Strings and integers for keys of dicts, ``("list", i)`` and ``("tuple", i)`` for indices."""


class Placeholder:
    """An object in ``into`` that a restore replaces. It cannot be saved."""


class Leaf(NamedTuple):
    """A value in the state. ``name``: its keys joined by dots. ``is_tensor``: see the function."""

    path: Path
    name: str
    value: object
    is_tensor: bool


def flatten(state: object, *, what: str = "state", placeholders: bool = False) -> list[Leaf]:
    """Every leaf of a nested state, in its own order. With ``placeholders``, these are leaves, too, that count as tensors.

    ``StateError`` naming the path for anything that is not a dict with string or integer keys, list, tuple, tensor, numpy
    array or plain value, for a container that contains itself, for two leaves of one name, and for a name that is too long.
    """
    if not isinstance(state, dict):
        raise not_a_dict(state, what)
    leaves = list[Leaf]()
    _walk(state, (), "", what, (), leaves)
    for leaf in () if placeholders else leaves:
        if isinstance(leaf.value, Placeholder):
            raise StateError(f"{_type(leaf.value)} cannot be saved", subject=show(leaf.path, what), remedy="restore it first")
    if len({leaf.name for leaf in leaves}) < len(leaves):
        seen: dict[str, Path] = {}
        for leaf in leaves:
            if leaf.name in seen:
                clash = f"has the same name {leaf.name!r} as {show(seen[leaf.name], what)}"
                raise StateError(clash, subject=show(leaf.path, what), remedy="rename one of them")
            seen[leaf.name] = leaf.path
    for leaf in leaves:
        if len(leaf.name) > _LONG and len(path_text(leaf.path)) > MAX_NAME:
            long = f"the keys of a value take more than {MAX_NAME:,} characters"
            raise StateError(long, subject=f"{show(leaf.path, what):.80}...", remedy="use shorter keys")
    return leaves


def not_a_dict(state: object, what: str) -> StateError:
    """The error of a state that is no dict."""
    remedy = 'pass it in a dict, such as {"model": model}' if hasattr(state, "state_dict") else "pass a dict"
    return StateError(f"{_type(state)} is not a dict", subject=what, remedy=remedy)


def contains_placeholders(into: object) -> bool:
    """Whether there is a placeholder anywhere in ``into``."""
    return _contains(into, Placeholder, 0)


def _contains(node: object, kind: type, depth: int) -> bool:
    if isinstance(node, kind):
        return True
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()
    return depth <= _DEEPEST and any(_contains(child, kind, depth + 1) for child in children)


def part_of(node: object, path: Path) -> object:
    """What is at a path below a node; None if nothing is."""
    for part in path:
        kind, key = (_SEQUENCES[part[0]], part[1]) if isinstance(part, tuple) else (dict, part)
        try:
            node = node[key] if isinstance(node, kind) else None  # type: ignore[index]
        except (KeyError, IndexError):
            return None
    return node


def _walk(node: object, path: Path, name: str, what: str, around: tuple[int, ...], leaves: list[Leaf]) -> None:
    """The training waits for this: names are built on the way down, and leaves are appended instead of returned."""
    if is_tensor(node):
        node = unwrapped(node)
        parts = inner_tensors(node, show(path, what)) if type(node) not in _SIMPLE else None
        if parts is None:
            leaves.append(Leaf(path, name, node, True))
            return
        _check_depth(node, path, what, around)
        for part_name, part in parts.items():
            _walk(part, (*path, part_name), f"{name}.{part_name}" if path else part_name, what, (*around, id(node)), leaves)
    elif values.is_plain(node) or isinstance(node, WrapperText):
        leaves.append(Leaf(path, name, node, False))
    elif isinstance(node, dict | list | tuple):
        _check_depth(node, path, what, around)
        items = _items(node, path, what)
        if not items and path:
            leaves.append(Leaf(path, name, node, False))
        within = (*around, id(node))
        for key, child in items:
            own = str(key[1]) if isinstance(key, tuple) else str(key)
            _walk(child, (*path, key), f"{name}.{own}" if path else own, what, within, leaves)
    elif isinstance(node, Placeholder):
        leaves.append(Leaf(path, name, node, True))
    else:
        problem = f"{_type(node)} is not a tensor, array, number, string, bytes, None, list, tuple or dict"
        raise StateError(
            problem,
            subject=show(path, what),
            remedy=f"leave it out, turn it into one of these, or {BY_METHODS}",
        )


def _check_depth(node: object, path: Path, what: str, around: tuple[int, ...]) -> None:
    if id(node) in around:
        raise StateError("contains itself", subject=show(path, what), remedy="leave it out")
    if len(around) == _DEEPEST:
        raise StateError(f"is nested more than {_DEEPEST} deep", subject=show(path[:3], what), remedy="flatten it")


def _items(node: Mapping[object, object] | Sequence[object], path: Path, what: str) -> Sequence[tuple[PathPart, object]]:
    if not isinstance(node, dict):
        kind = "list" if isinstance(node, list) else "tuple"
        return [((kind, i), child) for i, child in enumerate(node)]
    for key in node:
        if type(key) not in (str, int):
            raise StateError(f"key {key!r} is neither a string nor an integer", subject=show(path, what), remedy="use a string")
        if isinstance(key, str) and not key.isascii() and any("\ud800" <= c <= "\udfff" for c in key):
            half = f"key {key!r} holds half of a surrogate pair, which is not valid UTF-8"
            raise StateError(half, subject=show(path, what), remedy="use another key")
    return list(node.items())


def is_tensor(node: object) -> bool:
    """Whether a node is a torch tensor, boxes of one, a numpy array or a numpy scalar."""
    torch = sys.modules.get("torch")
    return (torch is not None and isinstance(node, torch.Tensor)) or isinstance(node, np.ndarray | np.generic | Box | Boxes)


def boxes(leaf: Leaf, what: str = "state") -> list[Leaf]:
    """The leaf, or one of the same name for each of several boxes."""
    if isinstance(leaf.value, Boxes):
        found: Sequence[Box] | None = leaf.value.boxes
    else:
        found = dtensor_boxes(leaf.value, show(leaf.path, what)) if is_dtensor(leaf.value) else None
    return [leaf] if found is None else [leaf._replace(value=box) for box in found]


def replace(node: object, new: Mapping[Path, object], path: Path = ()) -> object:
    """``node`` with what ``new`` has for some paths: dicts and lists are changed in place, tuples are made anew."""
    return _replaced(node, new, path, set())


def _replaced(node: object, new: Mapping[Path, object], path: Path, renewed: set[int]) -> object:
    if path in new:
        return _renewed(node, new[path], renewed)
    if is_tensor(node) or not isinstance(node, dict | list | tuple):
        return node
    if isinstance(node, tuple):
        return _tuple_like(node, [_replaced(child, new, (*path, ("tuple", i)), renewed) for i, child in enumerate(node)])
    for key, child in list(node.items() if isinstance(node, dict) else enumerate(node)):
        put = _replaced(child, new, (*path, key if isinstance(node, dict) else ("list", key)), renewed)
        if put is not child:
            node[key] = put
    return node


def _renewed(old: object, new: object, renewed: set[int]) -> object:
    """``new``, in the dicts and lists of ``old`` where the kinds are equal. ``renewed``: the containers that have new content:
    one that is in two places gets it in the first only."""
    if isinstance(old, dict) and isinstance(new, dict) and id(old) not in renewed:
        renewed.add(id(old))
        for key in old.keys() - new.keys():
            del old[key]
        for key, child in new.items():  # keys that were there keep their order, which versions do not have
            old[key] = _renewed(old.get(key), child, renewed)
        return old
    if isinstance(old, list) and isinstance(new, list) and id(old) not in renewed:
        renewed.add(id(old))
        old[:] = [_renewed(old[i] if i < len(old) else None, child, renewed) for i, child in enumerate(new)]
        return old
    if isinstance(old, tuple) and isinstance(new, tuple):
        return _tuple_like(old, [_renewed(old[i] if i < len(old) else None, child, renewed) for i, child in enumerate(new)])
    return new


def _tuple_like(old: tuple[object, ...], items: list[object]) -> tuple[object, ...]:
    if len(items) == len(old) and all(a is b for a, b in zip(items, old, strict=True)):
        return old
    if hasattr(old, "_make"):
        return old._make(items) if len(items) == len(old) else tuple(items)
    return type(old)(items)


def show(path: Path, what: str = "state") -> str:
    """A path as Python writes it: ``state["optim"]["state"][0]``."""
    return what + "".join(f"[{p[1]}]" if isinstance(p, tuple) else f'["{p}"]' if isinstance(p, str) else f"[{p}]" for p in path)


def _type(node: object) -> str:
    kind = type(node)
    return kind.__name__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__name__}"
