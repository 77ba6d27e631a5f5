"""A value of any structure as one text, for states whose structure a restore cannot know: ``client_state``, schedulers."""

from __future__ import annotations

import json

import numpy as np

from ...storage.coding import dtypes
from ...storage.errors import Damaged
from ...storage.format import manifest, values
from ...storage.format.manifest import parse_path, path_text
from ...storage.version import as_torch
from ..save.shards import bits, shard_of
from ..save.state_tree import Leaf, flatten
from .dcp.keys import assemble

_ROOT = "value"


def text_of(value: object, what: str) -> str:
    """The text of plain values, tensors, arrays, and dicts, lists and tuples of these; they are small, as all ranks store it.

    Raises ``StateError`` that names the path below ``what`` of anything else.
    """
    return json.dumps([[path_text(leaf.path), _form(leaf)] for leaf in flatten({_ROOT: value}, what=what)])


def value_of(text: str) -> object:
    """The value of a text that ``text_of`` returned. Raises ``Damaged`` for any other."""
    try:
        parts = [(parse_path(path), _value(form)) for path, form in json.loads(text)]
    except (ValueError, TypeError, KeyError) as error:
        raise Damaged(f"not the text of a value: {error}") from error
    found = assemble(parts)
    if not isinstance(found, dict) or found.keys() != {_ROOT}:
        raise Damaged("not the text of a value")
    return found[_ROOT]


def _form(leaf: Leaf) -> object:
    if not leaf.is_tensor:
        return values.encode(leaf.value)
    shard = shard_of(leaf)
    local = shard.local if isinstance(shard.local, np.ndarray) else bits(shard.local.detach().cpu())
    data = values.encode(np.ascontiguousarray(local).tobytes())
    return {"kind": shard.kind, "dtype": shard.dtype, "shape": shard.shape, "data": data}


def _value(form: object) -> object:
    if not isinstance(form, dict) or "kind" not in form:
        return values.decode(form)
    data = values.decode(form["data"])
    if not isinstance(data, bytes):
        raise TypeError("no bytes")
    raw = np.frombuffer(bytearray(data), f"V{dtypes.dtype(form['dtype']).itemsize}").reshape(form["shape"])
    return as_torch(raw, form["dtype"]) if form["kind"] == manifest.TENSOR else raw.view(dtypes.to_numpy(form["dtype"]))
