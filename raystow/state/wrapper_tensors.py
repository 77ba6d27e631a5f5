"""Tensors that consist of other tensors: a wrapper subclass is a container of its inner tensors, by the names of
``__tensor_flatten__``, and of a text that describes the wrapper itself.

An inner tensor of a shard whose size along each sharded dimension is that of the shard is a box of a whole tensor, and may be
resharded. Others, such as the scales of blocks, are stored by themselves, under the name of the shard's box: they are restored
only where the same box is sharded, bit for bit.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeGuard, TypeVar

from ..storage.errors import StateError
from .box import Box
from .dtensor_layout import dtensor_shard, is_dtensor

if TYPE_CHECKING:
    import torch

_Node = TypeVar("_Node")

DESCRIPTION = "__class__"
"""The name of the text that describes a wrapper; no inner tensor has it."""
WRAPPER = '{"class": '
"""The beginning of that text."""


class WrapperText(str):
    """Class, dtype, shape and metadata of a wrapper. A restore compares it with the one saved, and changes nothing."""

    __slots__ = ()


class ShardPart(Box):
    """What belongs to one shard, and cannot be restored into others; or nothing, of a shard without elements."""


def unwrapped(node: _Node) -> _Node:
    """The tensor that an asynchronous collective makes, when it has ended; any other node itself."""
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    while collectives is not None and isinstance(node, collectives.AsyncCollectiveTensor):
        node = node.trigger_wait()
    return node


def inner_tensors(node: object, where: str) -> Mapping[str, object] | None:
    """The parts of a wrapper, of a DTensor whose shards are wrappers, or of a box that is one; None for any other tensor.

    ``StateError`` naming ``where`` if its metadata cannot be described.
    """
    torch = sys.modules.get("torch")
    if torch is None or type(node) is torch.Tensor or type(node) is torch.nn.Parameter:  # as most are
        return None
    if is_dtensor(node):
        if not _is_wrapper(local := unwrapped(node._local_tensor)):
            return None
        (offset, _), holders = dtensor_shard(node, where)
        return _parts(local, Box(local, tuple(node.shape), offset, holders), where)
    if isinstance(node, Box):
        local = unwrapped(node.local)
        return _parts(local, node, where) if _is_wrapper(local) else None
    return _parts(node, None, where) if _is_wrapper(node) else None


def is_composed(tensor: object) -> bool:
    """Whether a tensor, or the local tensor of a DTensor, consists of others."""
    return _is_wrapper(tensor._local_tensor if is_dtensor(tensor) else tensor)


def _is_wrapper(tensor: object) -> TypeGuard[torch.Tensor]:
    if not hasattr(type(tensor), "__tensor_flatten__") or not hasattr(type(tensor), "__tensor_unflatten__"):
        return False
    torch = sys.modules["torch"]
    return isinstance(tensor, torch.Tensor) and not is_dtensor(tensor) and not tensor.is_nested


def _parts(outer: torch.Tensor, box: Box | None, where: str) -> dict[str, object]:
    names, context = outer.__tensor_flatten__()
    shape = tuple(outer.shape if box is None else box.shape)
    form = {
        "class": _class_name(outer),
        "dtype": str(outer.dtype),
        "shape": list(shape),
        "context": _form(context, tuple(outer.shape), where),
    }
    made: dict[str, object] = {DESCRIPTION: WrapperText(json.dumps(form, sort_keys=True))}
    for name in names:
        inner = getattr(outer, name)
        if inner is not getattr(outer, name):
            what = f"{_class_name(outer)}.{name} is a new tensor each time, which cannot be filled in place"
            raise StateError(what, subject=where, remedy="save its parts")
        made[name] = inner if box is None else _part(inner, box)
    return made


def _part(inner: torch.Tensor, box: Box) -> object:
    """What an inner tensor of a shard is: a box, or a dict with the shard's box as its only key."""
    sizes, offset, extent = tuple(inner.shape), box.offset, box.extent
    if 0 in extent and 0 in sizes:  # other ranks know the shape of the whole
        return ShardPart(inner, tuple(size or 1 for size in sizes), (0,) * len(sizes), box.ranks)
    split = [d for d, (size, whole) in enumerate(zip(extent, box.shape, strict=True)) if size != whole]
    if all(d < len(sizes) and sizes[d] == extent[d] for d in split):
        shape = tuple(box.shape[d] if d in split else size for d, size in enumerate(sizes))
        return Box(inner, shape, tuple(offset[d] if d in split else 0 for d in range(len(sizes))), box.ranks)
    ranges = ", ".join(f"{low}:{low + size}" for low, size in zip(offset, extent, strict=True))
    owner = f" of rank {box.ranks[0]}" if 0 in extent and box.ranks else ""
    return {f"[{ranges}]{owner}": ShardPart(inner, sizes, (0,) * len(sizes), box.ranks)}


def _class_name(tensor: object) -> str:
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


def _form(context: object, local: tuple[int, ...], where: str) -> object:
    """The metadata of a wrapper as JSON. The shape of the shard is the word ``shape``, since other shards have other ones. A
    device may change."""
    torch = sys.modules["torch"]

    def form(value: object) -> object:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, tuple | list):
            if tuple(value) == local and all(type(size) is int for size in value):
                return "shape"
            items = [form(item) for item in value]
            return {"class": _class_name(value), "fields": items} if hasattr(value, "_fields") else items
        if isinstance(value, dict):
            return {"items": [[form(key), form(item)] for key, item in value.items()]}
        if isinstance(value, torch.device):
            return "device"
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format | slice | bytes | complex):
            return str(value)
        if isinstance(value, enum.Enum):
            return str(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [[field.name, form(getattr(value, field.name))] for field in dataclasses.fields(value)]
            return {"class": _class_name(value), "fields": fields}
        if isinstance(value, type | Callable) and hasattr(value, "__qualname__"):
            return f"{value.__module__}.{value.__qualname__}"
        what = f"its metadata has a {_class_name(value)}, which cannot be described"
        raise StateError(what, subject=where, remedy="save its parts")

    return form(context)
