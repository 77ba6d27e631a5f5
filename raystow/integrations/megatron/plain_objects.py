"""Objects in a state of Megatron as text: its arguments, states of random generators, schedules.

They are trees of plain values and small tensors (``state.value_text``), and objects of the classes that Megatron itself lists as
safe to load. Reading a text makes no other objects and runs no code.
"""

from __future__ import annotations

import enum
import io
from collections import OrderedDict
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from megatron.core.safe_globals import SAFE_GLOBALS

from ...state import value_text
from ...storage.errors import Damaged, StateError

_MARK = "\0"
"""The only key of a dict that stands for an object."""
_SAFE = {f"{one.__module__}.{one.__qualname__}": one for one in SAFE_GLOBALS if isinstance(one, type)}
_DTYPES = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}


def encode(value: object, what: str) -> torch.Tensor:
    """The text of a value as a tensor of bytes. ``StateError`` names the path below ``what`` of an object that cannot be
    stored."""
    text = value_text.dumps(_plain(value, what), what=what).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def decode(text: torch.Tensor) -> Any:
    """The value of a text. ``Damaged`` if it names a class that this release of Megatron does not list."""
    return _object(value_text.loads(text.numpy().tobytes().decode()))


def _plain(node: object, what: str) -> object:
    kind = type(node)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(node, torch.Tensor | np.ndarray | np.generic):
        return node
    if isinstance(node, enum.Enum) and name in _SAFE:
        return {_MARK: ("member", name, node.name)}
    if isinstance(node, io.BytesIO):
        return {_MARK: ("bytes", node.getvalue())}
    if isinstance(node, torch.dtype):
        return {_MARK: ("dtype", str(node))}
    if isinstance(node, PurePath):
        return {_MARK: ("path", str(node))}
    if isinstance(node, dict):
        if _MARK in node:
            raise StateError(f"the key {_MARK!r} is reserved", subject=what)
        items = {key: _plain(child, f"{what}[{key!r}]") for key, child in node.items()}
        return OrderedDict(items) if isinstance(node, OrderedDict) else items
    if isinstance(node, list | tuple):
        children = [_plain(child, f"{what}[{i}]") for i, child in enumerate(node)]
        return children if isinstance(node, list) else tuple(children)
    if name in _SAFE and hasattr(node, "__dict__"):
        return {_MARK: ("object", name, {key: _plain(child, f"{what}.{key}") for key, child in vars(node).items()})}
    if isinstance(node, enum.Enum):
        raise StateError(f"a member of {name}, which Megatron does not list as safe to load, cannot be stored", subject=what)
    return node


def _object(node: object) -> object:
    if isinstance(node, dict):
        if _MARK not in node:
            for key, child in node.items():
                node[key] = _object(child)
            return node
        try:
            return _marked(*node[_MARK])
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(f"an object of Megatron that this release does not know: {node[_MARK]!r:.80}") from error
    if isinstance(node, list):
        node[:] = [_object(child) for child in node]
        return node
    return tuple(_object(child) for child in node) if isinstance(node, tuple) else node


def _marked(sort: str, *parts: object) -> object:
    match sort, *parts:
        case "member", str(name), str(member):
            return _SAFE[name][member]  # type: ignore[index]
        case "bytes", bytes(content):
            return io.BytesIO(content)
        case "dtype", str(name):
            return _DTYPES[name]
        case "path", str(path):
            return PurePath(path)
        case "object", str(name), dict(fields):
            kind: type[object] = _SAFE[name]
            made = kind.__new__(kind)
            vars(made).update({key: _object(child) for key, child in fields.items()})
            return made
    raise ValueError(sort)
