"""DCP's keys and raystow's names. Both join a path by dots, but DCP walks into lists only if they hold tensors or dicts, and
into tuples never: ``betas`` is one key there, and two names here, ``betas.0`` and ``betas.1``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....storage.errors import Damaged, StateError
from ...state import Path

_STEP = re.compile(r"(?:.*\D)?(\d{1,18})/?")


@dataclass(frozen=True)
class Leaf:
    """A row of the manifest. ``is_tensor``: a torch tensor, not an array. ``is_nothing``: a dict without entries."""

    name: str
    path: Path
    is_tensor: bool = False
    is_nothing: bool = False


@dataclass(frozen=True)
class Key:
    """A key of DCP's, the path that it gives it, and what it consists of: names, and where each stands within the value."""

    path: tuple[str | int, ...]
    parts: list[tuple[str, Path]] = field(default_factory=list)


def path_of(key: str, mappings: Mapping[str, Sequence[str | int]]) -> Path:
    """raystow's path of a key; ``mappings`` are those of DCP's planner, in which integers are indices of lists."""
    return tuple(("list", part) if isinstance(part, int) else part for part in mappings.get(key, (key,)))


def parse(text: str) -> Path:
    """The inverse of ``manifest.path_text``; ``Damaged`` for anything else."""
    try:
        return tuple(part if isinstance(part, str | int) else _index(part) for part in json.loads(text))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"not a path: {text[:80]!r}") from error


def _index(part: Any) -> tuple[str, int]:
    ((kind, at),) = part.items()
    if kind not in ("list", "tuple") or type(at) is not int:
        raise ValueError(kind)
    return kind, at


def keys_of(leaves: Iterable[Leaf]) -> dict[str, Key]:
    """The keys that DCP would have made of a state with these leaves."""
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


def _walks(leaf: Leaf, at: int) -> bool:
    """Whether DCP walks into the list whose index stands at ``at`` because of this leaf: lists lead to a tensor or dict."""
    if not isinstance(leaf.path[at], tuple) or leaf.path[at][0] != "list":
        return False
    below = next((part for part in leaf.path[at:] if not isinstance(part, tuple) or part[0] != "list"), None)
    return leaf.is_tensor or leaf.is_nothing if below is None else not isinstance(below, tuple)


def assemble(parts: Sequence[tuple[Path, Any]]) -> Any:
    """The value of a key from its parts."""
    if len(parts) == 1 and not parts[0][0]:
        return parts[0][1]
    inner: dict[Any, list[tuple[Path, Any]]] = {}
    for path, value in parts:
        if not path:
            raise Damaged("a value and a list of values have the same name")
        inner.setdefault(path[0], []).append((path[1:], value))
    kinds = {part[0] if isinstance(part, tuple) else "dict" for part in inner}
    if len(kinds) != 1:
        raise Damaged(f"a value is {' and '.join(sorted(kinds))} at once")
    if kinds == {"dict"}:
        return {key: assemble(below) for key, below in inner.items()}
    items = [assemble(inner[part]) for part in sorted(inner)]
    return items if kinds == {"list"} else tuple(items)


def step_of(checkpoint_id: object) -> int:
    """The step that a ``checkpoint_id`` of DCP's names: a number, or a text that ends in one, such as ``step-100``."""
    match = _STEP.fullmatch(str(checkpoint_id))
    if match is None:
        remedy = "end it in the step, as in 'step-100', or pass none: the repository is the Writer's and the Reader's"
        raise StateError("names no step", subject=f"checkpoint_id {str(checkpoint_id)!r}", remedy=remedy)
    return int(match[1])


def names_step(checkpoint_id: object) -> bool:
    """Whether ``step_of`` finds one."""
    return _STEP.fullmatch(str(checkpoint_id)) is not None
