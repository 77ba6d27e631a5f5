"""Maps DCP's keys to raystow's names. Both join a path by dots, but DCP flattens lists only if they contain tensors or dicts, and
tuples never: ``betas`` is one key in DCP and two names in raystow, ``betas.0`` and ``betas.1``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...state.tree import Path, PathPart
from ...storage.errors import Damaged


@dataclass(frozen=True)
class KeyLeaf:
    """A tensor or value of the manifest. ``is_tensor``: a torch tensor, not an array. ``is_nothing``: an empty dict."""

    name: str
    path: Path
    is_tensor: bool = False
    is_nothing: bool = False


@dataclass(frozen=True)
class Key:
    """A key of DCP, its path, and its parts: names, and the path of each within the value."""

    path: tuple[str | int, ...]
    parts: list[tuple[str, Path]] = field(default_factory=list)


def path_of(key: str, mappings: Mapping[str, Sequence[str | int]]) -> Path:
    """Return raystow's path of a key; in ``mappings`` of DCP's planner, integers are indices of lists."""
    return tuple(("list", part) if isinstance(part, int) else part for part in mappings.get(key, (key,)))


def keys_of(leaves: Iterable[KeyLeaf]) -> dict[str, Key]:
    """Return the keys that DCP would create for a state with these leaves."""
    leaves = list(leaves)
    walked = {leaf.path[:i] for leaf in leaves for i in range(len(leaf.path)) if _walks(leaf, i)}
    keys: dict[str, Key] = {}
    for leaf in leaves:
        end = next((i for i, part in enumerate(leaf.path) if isinstance(part, tuple) and leaf.path[:i] not in walked), None)
        if end is None and leaf.is_nothing:
            continue  # DCP has no key for it
        path = tuple(part[1] if isinstance(part, tuple) else str(part) for part in leaf.path[:end])
        key = keys.setdefault(".".join(map(str, path)), Key(path))
        key.parts.append((leaf.name, () if end is None else leaf.path[end:]))
    return keys


def _walks(leaf: KeyLeaf, at: int) -> bool:
    """Whether DCP flattens the list with the index at ``at`` because of this leaf: it leads to a tensor or dict."""
    index = leaf.path[at]
    if not isinstance(index, tuple) or index[0] != "list":
        return False
    below = next((part for part in leaf.path[at:] if not isinstance(part, tuple) or part[0] != "list"), None)
    return leaf.is_tensor or leaf.is_nothing if below is None else not isinstance(below, tuple)


def assemble(parts: Sequence[tuple[Path, object]]) -> object:
    """Assemble the value of a key from its parts."""
    if len(parts) == 1 and not parts[0][0]:
        return parts[0][1]
    inner: dict[PathPart, list[tuple[Path, object]]] = {}
    for path, value in parts:
        if not path:
            raise Damaged("a value and a list of values have the same name")
        inner.setdefault(path[0], []).append((path[1:], value))
    kinds = {part[0] if isinstance(part, tuple) else "dict" for part in inner}
    if len(kinds) != 1:
        raise Damaged(f"a value is {' and '.join(sorted(kinds))} at once")
    if kinds == {"dict"}:
        return {key: assemble(below) for key, below in inner.items()}
    items = [assemble(below) for _, below in sorted(inner.items(), key=operator.itemgetter(0))]
    return items if kinds == {"list"} else tuple(items)
