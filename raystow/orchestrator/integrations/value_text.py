"""A value of any structure as one text, for states whose structure a restore cannot know: ``client_state``, schedulers."""

from __future__ import annotations

import json

import numpy as np

from ...storage.coding import dtypes
from ...storage.errors import Damaged, StateError
from ...storage.format import manifest, values
from ...storage.format.manifest import parse_path, path_text
from ...storage.version import as_torch
from ..save.shards import Shard, bits, shard_of
from ..save.state_tree import Leaf, check_values, flatten, show
from .dcp.keys import assemble

_ROOT = "value"
_MOST = 256 << 20
"""Bytes of the tensors in a text: the training waits for it, and each rank stores its own."""


def text_of(value: object, what: str) -> str:
    """The text of plain values, tensors, arrays, and dicts, lists and tuples of these.

    Raises ``StateError`` that names the path below ``what`` of anything else, and of a DTensor of which this rank has a part
    only; and for more than 256 MiB of tensors.
    """
    leaves = flatten({_ROOT: value}, what=what)
    check_values(leaves, what)
    shards = {leaf.path: _whole(leaf, what) for leaf in leaves if leaf.is_tensor}
    nbytes = sum(shard.local.nbytes for shard in shards.values())
    if nbytes > _MOST:
        remedy = "make them weights or buffers of the model, or save them by another Checkpointer"
        raise StateError(f"has {nbytes >> 20} MiB of tensors, more than {_MOST >> 20} MiB", subject=what, remedy=remedy)
    forms = {leaf.path: _form(shards[leaf.path]) if leaf.is_tensor else values.encode(leaf.value) for leaf in leaves}
    return json.dumps([[path_text(path), form] for path, form in forms.items()])


def value_of(text: str) -> object:
    """The value of a text that ``text_of`` returned. Raises ``Damaged`` for any other."""
    try:
        parts = [(parse_path(path), _value(form)) for path, form in json.loads(text)]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Damaged(f"not the text of a value: {error}") from error
    found = assemble(parts)
    if not isinstance(found, dict) or found.keys() != {_ROOT}:
        raise Damaged("not the text of a value")
    return found[_ROOT]


def _whole(leaf: Leaf, what: str) -> Shard:
    shard = shard_of(leaf, what=what)
    if shard.extent != shard.shape:
        raise StateError(
            "a DTensor of which each rank has a part", subject=show(leaf.path, what), remedy="pass its full_tensor()"
        )
    return shard


def _form(shard: Shard) -> object:
    local = shard.local if isinstance(shard.local, np.ndarray) else bits(shard.local.detach().resolve_conj().resolve_neg().cpu())
    data = values.encode(np.ascontiguousarray(local).tobytes())
    return {"kind": shard.kind, "dtype": shard.dtype, "shape": shard.shape, "data": data}


def _value(form: object) -> object:
    if not isinstance(form, dict) or "kind" not in form:
        return values.decode(form)
    data = values.decode(form["data"])
    if not isinstance(data, bytes):
        raise TypeError("no bytes")
    raw = np.frombuffer(bytearray(data), f"V{dtypes.dtype(form['dtype']).itemsize}").reshape(form["shape"])
    if form["kind"] == manifest.TENSOR:
        return as_torch(raw, form["dtype"])
    array = raw.view(dtypes.to_numpy(form["dtype"]))
    return array[()] if form["kind"] == manifest.SCALAR else array
