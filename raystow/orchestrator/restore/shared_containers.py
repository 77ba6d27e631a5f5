"""Checks containers that are in ``into`` at two places: each of their entries gets one value, not two. Changes nothing.

Their tensors are checked by ``targets``. Containers of plain values that are replaced whole need no check: the second place gets
a container of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np

from ...state.tree import Path, PathPart, show
from ...storage.errors import StateError
from ...storage.format import values

_Changed: TypeAlias = dict[object, object] | list[object]


def check_containers(into: object, new: Mapping[Path, object], what: str) -> None:
    """``StateError`` naming both places of an entry that would get different values. ``new``: what replaces parts of ``into``, by
    path. Whether two restored tensors are equal is not known: they count as different."""
    first = dict[int, Path]()
    for path, container in _containers(into, new, ()):
        before = first.setdefault(id(container), path)
        if before is path:
            continue
        for part in _parts(container):
            one, other = (*before, part), (*path, part)
            if one in new and other in new and not _same(new[one], new[other]):
                said = (
                    f"is in the same {type(container).__name__} as {show(one, what)}, and the version holds another value there"
                )
                raise StateError(
                    said, subject=show(other, what), remedy=f"give each place a {type(container).__name__} of its own"
                )


def _containers(node: object, new: Mapping[Path, object], path: Path) -> Iterator[tuple[Path, _Changed]]:
    """The dicts and lists in which parts are replaced, by path."""
    if path in new or not isinstance(node, dict | list | tuple):
        return
    if not isinstance(node, tuple):
        yield path, node
    children = node.values() if isinstance(node, dict) else node
    for part, child in zip(_parts(node), children, strict=True):
        if isinstance(child, dict | list | tuple):
            yield from _containers(child, new, (*path, part))


def _parts(container: object) -> list[PathPart]:
    if isinstance(container, dict):
        return list(container)
    assert isinstance(container, list | tuple)
    return [("list" if isinstance(container, list) else "tuple", place) for place in range(len(container))]


def _same(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, np.generic) and isinstance(other, np.generic):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return values.is_plain(one) and values.dumps(one) == values.dumps(other)
