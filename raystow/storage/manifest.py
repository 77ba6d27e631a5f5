"""The manifest: which chunk of which pack holds which box of which tensor. One Parquet fragment per node of a save.

A *box* is ``offset`` and ``extent``, one number per dimension: the chunk holds the elements ``[offset, offset + extent)`` of the
tensor in row-major order. Values that are not tensors stand in rows of their own, with the ranks they belong to.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from . import dtypes
from .boxes import Box
from .chunk import MAX_CHUNK, Coding
from .errors import Damaged, Unsupported

MAX_FRAGMENT = 1 << 30
"""Bytes; a reader refuses a larger fragment."""

TENSOR, ARRAY, SCALAR, VALUE = "tensor", "array", "scalar", "value"
"""Kinds of rows: a torch tensor, a numpy array, a numpy scalar, and a plain Python value."""

SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("path", pa.string()),
        ("kind", pa.string()),
        ("ranks", pa.list_(pa.int32())),
        ("value", pa.string()),
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("offset", pa.list_(pa.int64())),
        ("extent", pa.list_(pa.int64())),
        ("group", pa.string()),
        ("pack", pa.int32()),
        ("start", pa.int64()),
        ("base", pa.int64()),
        ("transform", pa.list_(pa.string())),
        ("codecs", pa.list_(pa.string())),
        ("stored", pa.list_(pa.int64())),
        ("stream", pa.int32()),
        ("streams", pa.list_(pa.int32())),
        ("raw_digest", pa.uint64()),
        ("stored_digest", pa.binary(32)),
    ]
)
_TRANSFORMS = {(False, False): [], (True, False): ["planes"], (True, True): ["rotl1", "planes"]}
_CODINGS = {tuple(names): flags for flags, names in _TRANSFORMS.items()}


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk row. ``node`` is the number of the node that wrote the fragment and the pack."""

    name: str
    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    node: int
    group: str
    pack: int
    start: int
    coding: Coding
    raw_digest: int
    stored_digest: bytes

    @property
    def box(self) -> Box:
        """The elements of the tensor that the chunk holds."""
        return self.offset, self.extent

    @property
    def nbytes(self) -> int:
        """Bytes after decoding."""
        return math.prod(self.extent) * dtypes.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Value:
    """One value row: ``text`` is JSON (see ``values``); ``ranks`` are those that saved this value under this name."""

    name: str
    path: str
    text: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Fragment:
    """The rows that one node wrote."""

    node: int
    chunks: tuple[Chunk, ...]
    values: tuple[Value, ...]

    def dump(self) -> bytes:
        """The fragment as a Parquet file, sorted by name and offset."""
        chunks = sorted(self.chunks, key=lambda c: (c.name, c.offset))
        values = sorted(self.values, key=lambda v: (v.name, v.ranks))
        rows = [_chunk_row(c) for c in chunks] + [_value_row(v) for v in values]
        rows.sort(key=lambda row: str(row["name"]))
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), sink, compression="zstd")
        return bytes(sink.getvalue())

    @staticmethod
    def load(data: bytes, node: int, key: str) -> Fragment:
        """Parse and check a fragment whose digest the caller has checked; ``Damaged`` naming ``key`` if a row makes no sense."""
        try:
            table = pq.read_table(pa.BufferReader(data), schema=SCHEMA)
            rows = table.to_pylist()
            chunks = tuple(_chunk(row, node) for row in rows if row["kind"] != VALUE)
            values = tuple(_value(row) for row in rows if row["kind"] == VALUE)
        except (Damaged, Unsupported) as error:
            raise type(error)(error.what, subject=key, remedy=error.remedy) from error
        except (pa.ArrowException, OSError, TypeError, ValueError, KeyError) as error:
            raise Damaged(f"not a manifest fragment: {error}", subject=key) from error
        return Fragment(node, chunks, values)


def _chunk_row(c: Chunk) -> dict[str, Any]:
    return {
        "name": c.name,
        "path": c.path,
        "kind": c.kind,
        "dtype": c.dtype,
        "shape": c.shape,
        "offset": c.offset,
        "extent": c.extent,
        "group": c.group,
        "pack": c.pack,
        "start": c.start,
        "transform": _TRANSFORMS[c.coding.planes, c.coding.rotated],
        "codecs": c.coding.codecs,
        "stored": c.coding.stored,
        "stream": c.coding.stream,
        "streams": c.coding.streams,
        "raw_digest": c.raw_digest,
        "stored_digest": c.stored_digest,
    }


def _value_row(v: Value) -> dict[str, Any]:
    return {"name": v.name, "path": v.path, "kind": VALUE, "value": v.text, "ranks": v.ranks}


def _chunk(row: dict[str, Any], node: int) -> Chunk:
    """A row as a chunk, with every number checked before anyone allocates or reads by it."""
    flags = _CODINGS.get(tuple(row["transform"]))
    if flags is None or row["base"] is not None or row["kind"] not in (TENSOR, ARRAY, SCALAR):
        raise Unsupported(
            f"row {row['name']!r}: kind {row['kind']!r}, transform {row['transform']!r}, base {row['base']!r} are not known",
            remedy="upgrade raystow",
        )
    chunk = Chunk(
        name=_text(row["name"]),
        path=_text(row["path"]),
        kind=row["kind"],
        dtype=_text(row["dtype"]),
        shape=tuple(row["shape"]),
        offset=tuple(row["offset"]),
        extent=tuple(row["extent"]),
        node=node,
        group=_text(row["group"]),
        pack=row["pack"],
        start=row["start"],
        coding=Coding(
            *flags, tuple(map(_text, row["codecs"])), tuple(row["stored"]), tuple(map(int, row["streams"])), int(row["stream"])
        ),
        raw_digest=int(row["raw_digest"]),
        stored_digest=bytes(row["stored_digest"]),
    )
    boxes = zip(chunk.offset, chunk.extent, chunk.shape, strict=True)
    if any(o < 0 or e < 0 or o + e > s for o, e, s in boxes) or not 0 <= chunk.nbytes <= MAX_CHUNK:
        raise Damaged(f"row {chunk.name!r}: box {chunk.offset} + {chunk.extent} does not lie in shape {chunk.shape}")
    if chunk.start < 0 or chunk.pack < 0 or min(chunk.coding.stored, default=-1) < 0 or chunk.coding.size > 2 * MAX_CHUNK:
        raise Damaged(f"row {chunk.name!r}: bytes {chunk.start} + {chunk.coding.size} of pack {chunk.pack} cannot be")
    return chunk


def _value(row: dict[str, Any]) -> Value:
    ranks = tuple(map(int, row["ranks"]))
    if not ranks or min(ranks) < 0:
        raise Damaged(f"row {row['name']!r}: ranks {ranks!r} cannot be")
    return Value(_text(row["name"]), _text(row["path"]), _text(row["value"]), ranks)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise Damaged(f"{value!r:.40} where a text is expected")
    return value


def path_text(path: tuple[Any, ...]) -> str:
    """A path as stored: a JSON list; a string is a dict's key, an integer a dict's integer key, ``{"list": i}`` and
    ``{"tuple": i}`` an index."""
    return json.dumps([p if isinstance(p, str | int) else {p[0]: p[1]} for p in path])
