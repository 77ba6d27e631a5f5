"""Small values in an entry as JSON text: plain values (``storage.format.values``), small tensors, and containers of these."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable

import numpy as np
import torch

from ...storage.coding import dtypes
from ...storage.errors import Damaged, StateError, Unsupported
from ...storage.format import values
from .gradient_coding import dtype_name

_DEEPEST = 32


def dumps(tree: object, *, what: str = "values") -> str:
    """Return the text of a tree; ``StateError`` names a value that cannot be stored."""
    return json.dumps(_encode(tree, what, 0), allow_nan=False, separators=(",", ":"))


def loads(text: str) -> object:
    """Return the tree of a text; tensors are on the CPU. ``Damaged`` for any other text."""
    try:
        return _decode(json.loads(text), 0)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Damaged(f"not a tree of values: {text[:40]!r}") from error


def _encode(node: object, where: str, depth: int) -> object:
    if depth > _DEEPEST:
        raise StateError(f"more than {_DEEPEST} containers inside each other", subject=where)
    if values.is_plain(node):
        return ["v", values.encode(node)]
    if isinstance(node, dict):
        keys = [["v", values.encode(key)] if values.is_plain(key) else _refuse(key, where) for key in node]
        return [
            "d",
            [[key, _encode(value, f"{where}.{name}", depth + 1)] for key, (name, value) in zip(keys, node.items(), strict=True)],
        ]
    if type(node) in (list, tuple):
        return ["l" if type(node) is list else "t", _items(node, where, depth)]  # type: ignore[arg-type]
    if isinstance(node, torch.Tensor):
        try:
            host = node.detach().cpu().contiguous()
            content = host.reshape(-1).view(torch.uint8).numpy().tobytes()
            return ["a", [dtype_name(host.dtype), list(host.shape), base64.b64encode(content).decode()]]
        except (RuntimeError, Unsupported):  # it is sparse, without data, or of a dtype that has no name
            return _refuse(node, where)
    if isinstance(node, np.generic) and values.is_plain(node.item()):
        return ["v", values.encode(node.item())]
    return _refuse(node, where)


def _items(nodes: Iterable[object], where: str, depth: int) -> list[object]:
    return [_encode(value, f"{where}[{i}]", depth + 1) for i, value in enumerate(nodes)]


def _refuse(node: object, where: str) -> object:
    remedy = "give numbers, strings, bytes, None, small tensors, and dicts, lists and tuples of these"
    raise StateError(f"a {type(node).__name__} cannot be recorded", subject=where, remedy=remedy)


def _decode(form: object, depth: int) -> object:
    if depth > _DEEPEST or not isinstance(form, list) or len(form) != 2:
        raise ValueError("not a node of a tree")
    tag, body = form
    if tag == "v":
        return values.decode(body)
    if tag == "d":
        return {_decode(key, depth + 1): _decode(value, depth + 1) for key, value in body}
    if tag in ("l", "t"):
        found = [_decode(value, depth + 1) for value in body]
        return found if tag == "l" else tuple(found)
    if tag == "a":
        name, shape, content = body
        raw = torch.frombuffer(bytearray(base64.b64decode(content, validate=True)) or bytearray(1), dtype=torch.uint8)
        dtype = getattr(torch, dtypes.dtype(name).name)
        size = int(np.prod(shape, dtype=np.int64)) * dtypes.dtype(name).itemsize
        return raw[:size].view(dtype).reshape(shape)
    raise ValueError("not a node of a tree")
