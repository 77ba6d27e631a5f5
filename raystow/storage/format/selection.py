"""Selects the rows of a fragment that a reader needs. The thousands of others never become objects."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import Damaged
from ..limits import MAX_DIMENSIONS
from . import parquet
from .boxes import Box, overlap, span
from .manifest import SCHEMA, VALUE, Chunk, Fragment, Value, parsing, rows_of
from .pack_sizes import PackSizes, add_packs

_BOX = ("name", "kind", "shape", "offset", "extent")


@dataclass(frozen=True)
class Sought:
    """What a rank reads under a name: a ``box`` of a tensor of ``shape``; without a box all of it, whatever its shape.
    ``tensor``: it must be a tensor, not a plain value. ``holders``: the ranks that read the same box; none: all. ``beneath``:
    also all tensors whose names begin with this one and a dot. ``own``: what this rank has saved itself is enough. ``every``: the
    values of all ranks are sought. ``like``: by a name beneath, what is read of tensors right beneath that which have its shape;
    all of others. ``container``: of a plain value, the outermost container around
    it that is replaced as a whole."""

    tensor: bool = False
    shape: tuple[int, ...] = ()
    box: Box | None = None
    holders: tuple[int, ...] = ()
    beneath: bool = False
    own: bool = False
    every: bool = False
    like: Mapping[str, Sought] = field(default_factory=dict, hash=False)
    container: str = ""


_WHOLE = Sought(tensor=True)


@dataclass
class Selection:
    """Rows of a fragment. ``names``: of all its tensors. ``spans``: of each tensor sought, the first and last element that the
    fragment has, row-major. ``packs``: all that the fragment names."""

    chunks: list[Chunk] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    packs: PackSizes = field(default_factory=dict)


def select(data: bytes, node: int, key: str, sought: Mapping[str, Sought]) -> Selection:
    """What is sought, and all plain values. Of a tensor of which nothing overlaps, or that has another shape, at most one row.
    Errors as of ``Fragment.load``; other rows are not checked."""
    selection, names = Selection(), parquet.texts(sought)
    within = [name for name, one in sought.items() if one.beneath]
    with parsing(key):
        for table in parquet.tables(data, SCHEMA):
            if table["name"].null_count or table["kind"].null_count:
                raise Damaged("a row without a name or a kind")
            plain = pc.equal(table["kind"], parquet.texts([VALUE])[0])
            selection.names.update(table["name"].filter(pc.invert(plain)).unique().to_pylist())
            wanted = pc.or_(plain, pc.is_in(table["name"], value_set=names))
            for name in within:
                wanted = pc.or_(wanted, pc.starts_with(table["name"], name + "."))
            rows = table.filter(wanted)
            kept = _kept(rows, sought, selection.spans)
            made = Fragment.of(rows_of(rows.take(parquet.integers(kept)) if len(kept) < len(rows) else rows), node)
            add_packs(table, selection.packs)
            selection.chunks += made.chunks
            selection.values += made.values
    return selection


def sought_like(name: str, shape: tuple[int, ...], like: Mapping[str, Sought]) -> Sought:
    """What is read of a tensor that is not sought by its own name. ``like``: see ``Sought``."""
    around = like.get(name.rpartition(".")[0]) if like else None
    return around if around is not None and around.shape == shape else _WHOLE


def _kept(rows: pa.Table, sought: Mapping[str, Sought], spans: dict[str, tuple[int, int]]) -> list[int]:
    """The numbers of the rows to keep."""
    kept, alone = list[int](), set[str]()
    like = ChainMap(*(dict(one.like) for one in sought.values() if one.like))
    for i, (name, kind, *of) in enumerate(zip(*(rows[column].to_pylist() for column in _BOX), strict=True)):
        if kind == VALUE:
            kept.append(i)
            continue
        shape, offset, extent = map(tuple, of)
        one = sought.get(name) or sought_like(name, shape, like)
        if not len(shape) == len(offset) <= MAX_DIMENSIONS:
            raise Damaged(f"row {name!r:.80}: shape and offset of different lengths, or of more than {MAX_DIMENSIONS}")
        low, high = span((offset, extent), shape)
        known = spans.get(name)
        spans[name] = (low, high) if known is None else (min(low, known[0]), max(high, known[1]))
        alike = one.shape == shape
        if one.box is None or (alike and overlap(one.box, (offset, extent)) is not None):
            kept.append(i)
        elif name not in alone and (not alike or 0 in one.box[1]):
            alone.add(name)
            kept.append(i)
    return kept
