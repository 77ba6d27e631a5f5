"""The packs of a node, which the rows of its fragment name: a pack ends where its last chunk does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import Damaged
from ..limits import MAX_INTEGER, MAX_STORED_CHUNK
from . import parquet
from .manifest import SCHEMA, numbers, parsing
from .version_record import PackInfo

PackSizes = dict[tuple[str, int], int]
"""Bytes of the packs of a node, by group and number."""

_COLUMNS = ("group", "pack", "start", "stored")
_NO_PLANES = parquet.integers([0])[0]


def pack_sizes(data: bytes, key: str) -> PackSizes:
    """The packs of a fragment whose digest the caller has checked. ``Damaged`` naming ``key`` if a row that names one makes no
    sense; nothing else of the rows is read."""
    sizes: PackSizes = {}
    with parsing(key):
        for table in parquet.tables(data, pa.schema([SCHEMA.field(name) for name in _COLUMNS])):
            add_packs(table, sizes)
    return sizes


def add_packs(table: pa.Table, sizes: PackSizes) -> None:
    """Add the packs that rows of the manifest name. Rows of values and references store no planes, and name none."""
    table = table.select(list(_COLUMNS))
    for batch in table.filter(pc.greater(pc.list_value_length(table["stored"]), _NO_PLANES)).to_batches():
        groups, packs, starts, stored = (batch[name] for name in _COLUMNS)
        if groups.null_count or packs.null_count or starts.null_count or stored.flatten().null_count:
            raise Damaged("a row without its place in a pack")
        first, planes = numbers(stored.offsets), numbers(stored.values)
        lengths = np.add.reduceat(planes[: first[-1]], first[:-1])
        wrong = planes[first[0] : first[-1]]
        if wrong.min() < 0 or wrong.max() > MAX_STORED_CHUNK:
            raise Damaged("impossible planes")
        begin, number = numbers(starts), numbers(packs)
        if begin.min() < 0 or number.min() < 0 or begin.max() > MAX_INTEGER - int(lengths.max()):
            raise Damaged("a row is outside all packs")
        named = groups.dictionary_encode()
        place, at = np.unique((numbers(named.indices).astype(np.int64) << 32) | number, return_inverse=True)
        ends = np.zeros(len(place), np.int64)
        np.maximum.at(ends, at.reshape(-1), begin + lengths)
        names = named.dictionary.to_pylist()
        for one, end in zip(place.tolist(), ends.tolist(), strict=True):
            where = names[one >> 32], one & 0xFFFFFFFF
            sizes[where] = max(end, sizes.get(where, 0))


def listed(packs: Iterable[PackInfo]) -> dict[int, PackSizes]:
    """The packs that a record lists, by node."""
    found = defaultdict[int, PackSizes](dict)
    for pack in packs:
        found[pack.node][pack.group, pack.number] = pack.size
    return found
