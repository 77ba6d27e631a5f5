"""A value of any structure as one text: for states whose structure a restore cannot know, which differ between ranks, and for the
values of an entry of the journal.

A node is a plain value (``storage.format.values``), or a list of a tag and a body: a container, or the elements of a tensor.
Containers come back as what they were, with keys of any type: ``load_state_dict`` gets what ``state_dict`` returned. A text names
no classes, so reading one runs no code: an object of another class is refused, and not left out.
"""

from __future__ import annotations

import base64
import enum
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterable
from typing import TypeAlias

import numpy as np
import torch

from ..storage.coding import dtypes
from ..storage.errors import Damaged, StateError
from ..storage.format import manifest, values
from ..storage.format.json_text import items_of, strict_json
from ..storage.limits import MAX_ITEMS
from ..storage.versions.torch_tensor import as_torch
from .shards import bits, shard_of
from .tree import Leaf, Path, show

_DEEPEST = 64
_MOST = 256 << 20
"""Bytes of the tensors in a text: the training waits for it, and each rank stores its own."""
_PLAIN = (bool, int, float, complex, str, bytes)
_FACTORIES = {"": None, **{kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict, set)}}
_TENSORS = {manifest.TENSOR: "a", manifest.ARRAY: "n", manifest.SCALAR: "s"}
_REMEDY = "give numbers, strings, bytes, None, small tensors, and dicts, lists, tuples and sets of these"


_Place: TypeAlias = "tuple[int, object, _Place | None]"
"""Of a node: how many containers are around it, its key or index in the innermost one, and the place of that."""


def dumps(tree: object, *, what: str = "values") -> str:
    """Return the text of a tree. ``StateError`` names the path below ``what`` of a value that cannot be stored, such as a DTensor
    of which this rank has a part only; also raised for more than 256 MiB of tensors or ``MAX_ITEMS`` values.

    An object of a subclass of a known type comes back as one of that type, equal to it: a named tuple as a tuple.
    """
    text = json.dumps(_Encoder(what).encode(tree, None), allow_nan=False, separators=(",", ":"))
    if (items := items_of(text)) > MAX_ITEMS:
        raise StateError(f"has {items} values; {MAX_ITEMS} can be stored", subject=what, remedy="make them tensors")
    return text


def loads(text: str) -> object:
    """Return the tree of a text; tensors are on the CPU. ``Damaged`` for any other text."""
    try:
        return _decode(strict_json(text), 0)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise Damaged(f"not a tree of values: {text[:40]!r}") from error


class _Encoder:
    """Encodes one tree, for which the training waits. ``nbytes``: of its tensors."""

    def __init__(self, what: str) -> None:
        self._what, self._nbytes = what, 0

    def encode(self, node: object, at: _Place | None) -> object:
        kind = type(node)
        if kind is str or kind is bool or node is None:
            return node
        if kind in values.PLAIN:
            return self._plain(node, at)
        if isinstance(node, np.str_ | np.bytes_):
            return self._plain(node.item(), at)
        if isinstance(node, torch.Tensor | np.ndarray | np.generic):
            return self._elements(node, at)
        if at is not None and at[0] == _DEEPEST:
            raise StateError(f"more than {_DEEPEST} containers inside each other", subject=show(_path(at)[:3], self._what))
        if isinstance(node, dict):
            return self._mapping(node, at)
        depth = 1 if at is None else at[0] + 1
        if isinstance(node, list | tuple | deque):
            items = [self.encode(item, (depth, i, at)) for i, item in enumerate(node)]
            return ["q", [node.maxlen, items]] if isinstance(node, deque) else ["t" if isinstance(node, tuple) else "l", items]
        if isinstance(node, set | frozenset):  # in an order that does not depend on the process
            items = [self.encode(item, (depth, item, at)) for item in node]
            return ["S" if isinstance(node, set) else "F", sorted(items, key=json.dumps)]
        if isinstance(node, _PLAIN):
            value = node.value if isinstance(node, enum.Enum) else node
            return self._plain(next(kind for kind in _PLAIN if isinstance(node, kind))(value), at)  # type: ignore[arg-type]
        return self._refuse(node, at)

    def _plain(self, value: object, at: _Place | None) -> object:
        try:
            return values.encode(value)
        except StateError as error:
            raise StateError(error.what, subject=show(_path(at), self._what), remedy=error.remedy) from None

    def _mapping(self, node: dict[Hashable, object], at: _Place | None) -> object:
        depth = 1 if at is None else at[0] + 1
        pairs = [[self.encode(key, (depth, key, at)), self.encode(value, (depth, key, at))] for key, value in node.items()]
        if isinstance(node, Counter):
            return ["c", pairs]
        if isinstance(node, OrderedDict):
            return ["o", pairs]
        if isinstance(node, defaultdict):
            for name, factory in _FACTORIES.items():
                if node.default_factory is factory:
                    return ["f", [name, pairs]]
            return self._refuse(node, at, f" with the factory {node.default_factory!r}")
        return ["d", pairs]

    def _elements(self, node: object, at: _Place | None) -> object:
        path = _path(at)
        shard = shard_of(Leaf(path, "", node, True), what=self._what)
        if shard.extent != shard.shape:
            part = "a DTensor of which each rank has a part"
            raise StateError(part, subject=show(path, self._what), remedy="pass its full_tensor()")
        self._nbytes += shard.local.nbytes
        if self._nbytes > _MOST:
            remedy = "make them weights or buffers of the model, or save them by another Checkpointer"
            raise StateError(f"has more than {_MOST >> 20} MiB of tensors", subject=self._what, remedy=remedy)
        local = shard.local
        if isinstance(local, torch.Tensor):
            local = bits(local.detach().resolve_conj().resolve_neg().cpu())
        content = base64.b64encode(np.ascontiguousarray(local).tobytes()).decode()
        return [_TENSORS[shard.kind], [shard.dtype, list(shard.shape), content]]

    def _refuse(self, node: object, at: _Place | None, how: str = "") -> object:
        name = f"{type(node).__module__}.{type(node).__qualname__}".removeprefix("builtins.")
        what = f"an object of class {name}{how} cannot be stored"
        raise StateError(what, subject=show(_path(at), self._what), remedy=_REMEDY)


def _path(at: _Place | None) -> Path:
    """The path that a place stands for, which only an error and a tensor need."""
    if at is None:
        return ()
    _, key, around = at
    return (*_path(around), key if isinstance(key, str | int) else f"{key!r:.80}")


def _decode(form: object, depth: int) -> object:
    if not isinstance(form, list):
        return values.decode(form)
    if depth > _DEEPEST + 1:
        raise ValueError("too deep")
    tag, body = form
    match tag:
        case "v":
            return values.decode(body)
        case "d":
            return dict(_pairs(body, depth))
        case "c":
            return Counter(dict(_pairs(body, depth)))
        case "o":
            return OrderedDict(_pairs(body, depth))
        case "f":
            factory, pairs = body
            return defaultdict(_FACTORIES[factory], _pairs(pairs, depth))
        case "q":
            most, items = body
            return deque(_items(items, depth), most)
        case "l":
            return _items(body, depth)
        case "t":
            return tuple(_items(body, depth))
        case "S":
            return set(_items(body, depth))
        case "F":
            return frozenset(_items(body, depth))
        case "a" | "n" | "s":
            return _tensor(tag, *body)
    raise ValueError("not a node of a tree")


def _items(forms: Iterable[object], depth: int) -> list[object]:
    return [_decode(form, depth + 1) for form in forms]


def _pairs(forms: Iterable[tuple[object, object]], depth: int) -> list[tuple[Hashable, object]]:
    return [(_decode(key, depth + 1), _decode(value, depth + 1)) for key, value in forms]


def _tensor(tag: str, dtype: str, shape: list[int], content: str) -> object:
    raw = np.frombuffer(bytearray(base64.b64decode(content, validate=True)), f"V{dtypes.dtype(dtype).itemsize}").reshape(shape)
    if tag == "a":
        return as_torch(raw, dtype)
    array = raw.view(dtypes.to_numpy(dtype))
    return array if tag == "n" else array[()]
