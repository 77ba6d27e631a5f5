"""The manifest: which chunk of which pack holds which box of which tensor. One Parquet fragment per node of a save.

A *box* is ``offset`` and ``extent``, one number per dimension: the chunk holds the elements ``[offset, offset + extent)`` of the
tensor in row-major order. Values that are not tensors have rows of their own, with the ranks that saved them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..coding import dtypes
from ..coding.chunk import Coding
from ..coding.derived import Derivation, derivable
from ..coding.digest import stored_digest
from ..coding.kernels import Words
from ..coding.rounded import Rounded
from ..errors import Damaged, StateError, Unsupported
from ..limits import (
    MAX_CHUNK,
    MAX_DEPTH,
    MAX_DIMENSIONS,
    MAX_INTEGER,
    MAX_NAME,
    MAX_NUMBER,
    MAX_STORED_CHUNK,
    MAX_TENSOR,
    most_text,
)
from . import parquet
from .boxes import Box
from .json_text import shown, strict_json
from .version_record import FragmentInfo

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
ROUNDED = pa.schema(
    [
        ("rounding", pa.string()),
        ("error", pa.float64()),
        ("relative", pa.float64()),
        ("signal", pa.float64()),
        ("noise", pa.float64()),
        ("spared", pa.int64()),
    ]
)
"""Further columns where tensors were rounded before they were stored; for people. All rows of a tensor say the same, of what the
node stores of it."""


class Row(NamedTuple):
    """A row as it is in Parquet, where any field may be null; ``streams`` as in ``Coding``."""

    name: str
    path: str
    kind: str
    ranks: list[int]
    value: str
    dtype: str
    shape: list[int]
    offset: list[int]
    extent: list[int]
    group: str
    pack: int
    start: int
    base: int | None
    transform: list[str]
    codecs: list[str]
    stored: list[int]
    stream: int
    streams: bytes
    raw_digest: int
    stored_digest: bytes


_REQUIRED = operator.itemgetter(*(i for i, name in enumerate(Row._fields) if name not in ("ranks", "value", "base")))
_ATTRIBUTES = (
    *("name", "path", "kind", "dtype", "shape", "offset", "extent"),
    *("group", "pack", "start", "raw_digest", "stored_digest"),
)
"""The columns that have the names and values of attributes of ``Chunk``."""
_TRANSFORMS = {(False, False): [], (True, False): ["planes"], (True, True): ["rotl1", "planes"]}
_CODINGS = {tuple(names): flags for flags, names in _TRANSFORMS.items()}
_DELTA, _SAME = "delta", "same"
_COPY, _ROUNDED = "copy", "rounded:"


class Chunk(msgspec.Struct, frozen=True):
    """One chunk row. ``node``: the node that wrote fragment and pack. ``derivation``: the bytes in the pack are those of another
    tensor's chunk with the same box.

    A node worker makes thousands in each save, and a struct is made ten times as fast as a dataclass. Copy it with
    ``msgspec.structs.replace``: ``dataclasses.replace`` fails, but mypy accepts it.
    """

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
    derivation: Derivation | None = None

    @property
    def box(self) -> Box:
        """Offset and extent in the tensor."""
        return self.offset, self.extent

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.extent) * dtypes.dtype(self.dtype).itemsize

    @property
    def is_reference(self) -> bool:
        """Whether the pack holds no bytes of it: its elements are those of the same chunk of version ``coding.base``."""
        return self.coding.is_reference

    @property
    def source(self) -> str:
        """The tensor whose elements the stored bytes are: its own name, or that of the one that it is derived from."""
        return self.name if self.derivation is None else self.derivation.source

    @property
    def words(self) -> dtypes.DType:
        """Of what the stored bytes are: the chunk's own elements, or those that they are derived from."""
        return dtypes.dtype(self.dtype if self.derivation is None else self.derivation.dtype)

    @property
    def proof(self) -> tuple[object, ...]:
        """Equal for chunks of one repository only if their elements are: BLAKE3 of the stored bytes, and all that decodes them.
        Equal elements may be stored in several ways."""
        beneath = None if self.coding.base is None else (self.source, self.box)
        return self.dtype, self.words.name, self.extent, self.coding, self.stored_digest, beneath

    @property
    def decoded(self) -> int:
        """Bytes after decoding."""
        return math.prod(self.extent) * self.words.itemsize

    @property
    def stored(self) -> int:
        """Bytes in a pack that count for it: none for a derived chunk."""
        return self.coding.size if self.derivation is None else 0


@dataclass(frozen=True, slots=True)
class Value:
    """One value row: ``text`` is JSON (see ``values``); ``ranks`` are those that saved this value under this name."""

    name: str
    path: str
    text: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Fragment:
    """The rows that one node wrote. ``rounded``: the errors of rounded tensors, by name."""

    node: int
    chunks: tuple[Chunk, ...]
    values: tuple[Value, ...]
    rounded: Mapping[str, Rounded] = field(default_factory=dict)

    @property
    def bases(self) -> tuple[int, ...]:
        """Ids of the versions that chunks are deltas or references to, ascending."""
        return tuple(sorted({chunk.coding.base for chunk in self.chunks if chunk.coding.base is not None}))

    @functools.cached_property
    def packs(self) -> dict[tuple[str, int], int]:
        """The bytes of each pack by group and number: those that its rows fill, without references."""
        sizes: dict[tuple[str, int], int] = {}
        for chunk in self.chunks:
            if not chunk.is_reference:
                place, end = (chunk.group, chunk.pack), chunk.start + chunk.coding.size
                if end >= sizes.get(place, 0):
                    sizes[place] = end
        return sizes

    def dump(self) -> bytes:
        """The fragment as a Parquet file, sorted by name and offset; ``StateError`` if it is more than readers take."""
        chunks = sorted(self.chunks, key=lambda c: (c.name, c.offset))
        values = sorted(self.values, key=lambda v: (v.name, v.ranks))
        rounded = {name: dict(zip(ROUNDED.names, astuple(one), strict=True)) for name, one in self.rounded.items()}
        rows = [_chunk_row(c) | rounded.get(c.name, {}) for c in chunks]
        rows += [{"name": v.name, "path": v.path, "kind": VALUE, "value": v.text, "ranks": v.ranks} for v in values]
        rows.sort(key=lambda row: str(row["name"]))
        schema = pa.unify_schemas([SCHEMA, ROUNDED]) if self.rounded else SCHEMA
        table = pa.Table.from_pylist(rows, schema)
        try:
            for one in itertools.chain[Chunk | Value](chunks, values):
                _short(one.name, one.path)
            try:
                return _parquet(table)
            except Damaged:  # readers take so much only from a file of some size
                return _parquet(table, compression="none", use_dictionary=False)
        except Damaged as error:
            raise StateError(f"the manifest of one node would be too large: {error.what}", remedy="save less in one") from error

    def info(self, data: bytes, ranks: Iterable[int], stall: float | None = None) -> FragmentInfo:
        """What the version record says of the fragment, which was dumped to ``data`` and describes the shards of ``ranks``."""
        return FragmentInfo(
            node=self.node,
            size=len(data),
            digest=stored_digest(data).hex(),
            ranks=tuple(sorted(ranks)),
            chunks=len(self.chunks),
            raw=sum(chunk.nbytes for chunk in self.chunks),
            stored=sum(chunk.stored for chunk in self.chunks),
            stall=stall,
            bases=self.bases,
            packs=len(self.packs),
        )

    @staticmethod
    def load(data: bytes, node: int, key: str) -> Fragment:
        """Parse and check a fragment whose digest the caller has checked; ``Damaged`` naming ``key`` if a row makes no sense."""
        with parsing(key):
            made = Fragment.of(itertools.chain.from_iterable(map(rows_of, parquet.tables(data, SCHEMA))), node)
            return replace(made, rounded=_rounded(data))

    @staticmethod
    def of(rows: Iterable[Row], node: int) -> Fragment:
        """Rows as ``rows_of`` gives them, each of them checked."""
        chunks, values = list[Chunk](), list[Value]()
        for row in rows:
            if row.kind == VALUE:
                values.append(_value(row))
            else:
                chunks.append(_chunk(row, node))
        return Fragment(node, tuple(chunks), tuple(values))


def rows_of(table: pa.Table) -> Iterator[Row]:
    """The rows of a table of the manifest's columns. The sizes of streams, which are most of all numbers, come as they are kept
    in memory, and are the only ones that are checked here."""
    for batch in table.to_batches(max_chunksize=8192):
        columns = (_packed(batch[name]) if name == "streams" else batch[name].to_pylist() for name in Row._fields)
        yield from map(Row._make, zip(*columns, strict=True))


def _packed(lists: pa.ListArray) -> list[bytes | None]:
    """The sizes of each row's streams as ``Coding`` has them."""
    ends = numbers(lists.offsets)
    flat = lists.values[ends[0] : ends[-1]]
    if flat.null_count or numbers(flat).min(initial=1) < 1:
        raise Damaged("impossible sizes of streams")
    data, ends = numbers(flat).tobytes(), ((ends - ends[0]) * flat.type.byte_width).tolist()
    there = lists.is_valid().to_pylist()
    return [data[start:end] if known else None for start, end, known in zip(ends, ends[1:], there, strict=False)]


def numbers(array: pa.Array) -> Words:
    """Integers where they lie. ``to_numpy`` would import pandas where there is one, which takes a third of a second, and swallows
    a Ctrl-C that comes meanwhile."""
    dtype, memory = np.dtype(str(array.type)), array.buffers()[1]
    if memory is None:
        return np.empty(0, dtype)
    return np.frombuffer(memory, dtype, len(array), array.offset * dtype.itemsize)


@contextlib.contextmanager
def parsing(key: str) -> Iterator[None]:
    """Whatever goes wrong with a fragment within is ``Damaged`` or ``Unsupported``, and names ``key``."""
    try:
        yield
    except (Damaged, Unsupported) as error:
        raise type(error)(error.what, subject=key, remedy=error.remedy) from error
    except (pa.ArrowException, OSError, TypeError, ValueError, LookupError, RuntimeError) as error:
        raise Damaged(f"not a manifest fragment: {str(error)[:300]}", subject=key) from error


def _chunk_row(c: Chunk) -> dict[str, object]:
    transform = list(_TRANSFORMS[c.coding.planes, c.coding.rotated])
    if c.coding.base is not None:
        transform.insert(0, _SAME if c.is_reference else _DELTA)
    if c.derivation is not None:
        transform.insert(0, _COPY if c.derivation.dtype == c.dtype else _ROUNDED + c.derivation.dtype)
    return {
        **{name: getattr(c, name) for name in _ATTRIBUTES},
        "value": c.derivation and c.derivation.source,
        "base": c.coding.base,
        "transform": transform,
        "codecs": c.coding.codecs,
        "stored": c.coding.stored,
        "stream": c.coding.stream,
        "streams": c.coding.sizes,
    }


def _derivation(row: Row) -> Derivation | None:
    """What the words in the pack are, if they are not the row's own."""
    first = row.transform[0] if row.transform else ""
    if first != _COPY and not first.startswith(_ROUNDED):
        return None
    found = Derivation(_text(row.value), row.dtype if first == _COPY else first.removeprefix(_ROUNDED))
    if not derivable(found.dtype, row.dtype) or row.kind != TENSOR:
        what = f"row {shown(row.name)}: {shown(row.dtype)} from {shown(found.dtype)} is not known"
        raise Unsupported(what, remedy="upgrade raystow")
    return found


def _parquet(table: pa.Table, *, compression: str = "zstd", use_dictionary: bool = True) -> bytes:
    """The table as a file; ``Damaged`` if readers would refuse it."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression=compression, use_dictionary=use_dictionary)
    data = bytes(sink.getvalue())
    parquet.check(data, table.schema)
    if table.nbytes > (most := most_text(len(data))):
        raise Damaged(f"{table.nbytes} bytes, more than {most}")
    return data


def _rounded(data: bytes) -> dict[str, Rounded]:
    """What the further columns say, if they are all there."""
    schema = pa.unify_schemas([pa.schema([SCHEMA.field("name")]), ROUNDED])
    if not {*ROUNDED.names} <= {*pq.read_schema(pa.BufferReader(data)).names}:
        return {}
    batches = (batch for table in parquet.tables(data, schema) for batch in table.to_batches(max_chunksize=8192))
    rows = (row for batch in batches for row in batch.to_pylist() if None not in row.values())
    found = {_text(row["name"]): Rounded(*(row[name] for name in ROUNDED.names)) for row in rows}
    if not all(math.isfinite(one.error) and math.isfinite(one.relative) for one in found.values()):
        raise Damaged("the rounding error is not a number")
    return found


def _chunk(row: Row, node: int) -> Chunk:
    """A row as a chunk, with every number checked before anyone allocates or reads by it."""
    if None in _REQUIRED(row) or None in row.codecs or None in row.transform:
        raise Damaged(f"row {shown(row.name)}: a required value is missing")
    derivation, base = _derivation(row), row.base
    transform = row.transform[derivation is not None :]
    same = transform == [_SAME] and not row.codecs and not row.stored and not row.streams
    delta = same or transform[:1] == [_DELTA]
    flags = _CODINGS.get(tuple(transform[delta:]))
    if flags is None or (delta and flags[1]) or delta is (base is None) or row.kind not in (TENSOR, ARRAY, SCALAR):
        named = f"kind {shown(row.kind)}, transform {shown(row.transform)}, base {base}"
        raise Unsupported(f"row {shown(row.name)}: {named} are not known", remedy="upgrade raystow")
    _short(row.name, row.path)
    _check_box(row, dtypes.dtype(row.dtype).itemsize, dtypes.dtype(derivation.dtype if derivation else row.dtype).itemsize)
    if row.start < 0 or not 0 <= row.pack <= MAX_NUMBER:
        raise Damaged(f"row {row.name!r:.80}: there is no byte {row.start} of a pack {row.pack}")
    if base is not None and not 1 <= base <= MAX_INTEGER:
        raise Damaged(f"row {row.name!r:.80}: there is no version {base}")
    if min(row.stored, default=0 if same else -1) < 0 or sum(row.stored) > MAX_STORED_CHUNK:
        raise Damaged(f"row {row.name!r:.80}: impossible planes of {shown(row.stored)} bytes")
    return Chunk(
        row.name,
        row.path,
        row.kind,
        row.dtype,
        tuple(row.shape),
        tuple(row.offset),
        tuple(row.extent),
        node,
        row.group,
        row.pack,
        row.start,
        Coding(*flags, tuple(row.codecs), tuple(row.stored), row.streams, row.stream, base),
        row.raw_digest,
        row.stored_digest,
        derivation,
    )


def _check_box(row: Row, item: int, word: int) -> None:
    """The box lies in the shape, and neither stands for more bytes than there can be. An empty tensor has a size as well: that of
    its shape without the zeros, which is what numpy looks at. ``item`` and ``word``: bytes of an element, and of what is stored
    of it."""
    shape, offset, extent = row.shape, row.offset, row.extent
    if not len(shape) == len(offset) == len(extent) <= MAX_DIMENSIONS:
        raise Damaged(f"row {row.name!r:.80}: shape, offset and extent of different lengths, or of more than {MAX_DIMENSIONS}")
    for first, size, end in zip(offset, extent, shape, strict=True):
        if first < 0 or size < 0 or first + size > end:
            raise Damaged(f"row {row.name!r:.80}: box {shown(offset)} + {shown(extent)} does not lie in shape {shown(shape)}")
    if math.prod(extent) * max(item, word) > MAX_CHUNK or math.prod(filter(None, shape)) * item > MAX_TENSOR:
        raise Damaged(f"row {row.name!r:.80}: extent {shown(extent)} or shape {shown(shape)} is too large")


def _value(row: Row) -> Value:
    value = Value(_text(row.name), _text(row.path), _text(row.value), tuple(map(int, row.ranks)))
    _short(value.name, value.path)
    if not value.ranks or not 0 <= min(value.ranks) <= max(value.ranks) <= MAX_NUMBER:
        raise Damaged(f"row {value.name!r:.80}: impossible ranks {shown(value.ranks)}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise Damaged(f"{shown(value)} where a text is expected")
    return value


def _short(name: str, path: str) -> None:
    if max(len(name), len(path)) > MAX_NAME:
        raise Damaged(f"a name or path of more than {MAX_NAME} characters: {name[:80]!r}")


def path_text(path: tuple[str | int | tuple[str, int], ...]) -> str:
    """A path as stored: a JSON list; a string is a dict's key, an integer a dict's integer key, ``{"list": i}`` and
    ``{"tuple": i}`` an index."""
    return json.dumps([p if isinstance(p, str | int) else {p[0]: p[1]} for p in path])


def parse_path(text: str) -> tuple[str | int | tuple[str, int], ...]:
    """Invert ``path_text``; raise ``Damaged`` for any other text."""
    try:
        path = tuple(part if isinstance(part, str | int) else _index(part) for part in strict_json(text))
        if len(path) > MAX_DEPTH:
            raise ValueError("too deep")
        return path
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"not a path: {text[:80]!r}") from error


def _index(part: dict[str, int]) -> tuple[str, int]:
    ((kind, at),) = part.items()
    if kind not in ("list", "tuple") or type(at) is not int:
        raise ValueError(kind)
    return kind, at
