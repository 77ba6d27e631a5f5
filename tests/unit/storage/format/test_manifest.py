"""Fragments survive a round trip, and an invalid row raises an error that names the fragment."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.builders import rows_and_pack, whole
from msgspec import structs

from raystow.storage.coding.chunk import packed
from raystow.storage.coding.rounded import Rounded
from raystow.storage.errors import Damaged, RaystowError, Unsupported
from raystow.storage.format.manifest import SCHEMA, Fragment, Value, parse_path, path_text
from raystow.storage.format.selection import Sought, select
from raystow.storage.limits import MAX_DEPTH

KEY = "versions/00000001-0000000000000000/tensors-00003.parquet"
VALUES = (Value("lr", '["lr"]', "0.1", (0, 1)), Value("seed", '["seed"]', "7", (1,)))
ROWS = rows_and_pack(
    {"w": whole(np.arange(6000, dtype=np.float32)), "b": (np.ones((4, 4)), [((0, 0), (2, 4)), ((2, 0), (2, 4))])}
)[0]
FRAGMENT = Fragment(0, tuple(sorted(ROWS, key=lambda row: (row.name, row.offset))), VALUES)
DATA = FRAGMENT.dump()


def changed(*, of: str = "array", schema: pa.Schema = SCHEMA, **fields: Any) -> bytes:
    """Return the fragment with some fields of the last row of kind ``of`` replaced."""
    rows = pq.read_table(pa.BufferReader(DATA)).to_pylist()
    last = [row for row in rows if row["kind"] == of][-1]
    last.update(fields)
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema), sink)
    return sink.getvalue()


def test_a_fragment_survives_dump_and_load() -> None:
    assert Fragment.load(DATA, 0, KEY) == FRAGMENT
    assert Fragment.load(changed(), 0, KEY) == FRAGMENT


def test_the_node_of_a_chunk_comes_from_its_file() -> None:
    assert {chunk.node for chunk in Fragment.load(DATA, 3, KEY).chunks} == {3}


def test_an_empty_fragment_survives_dump_and_load() -> None:
    assert Fragment.load(Fragment(0, (), ()).dump(), 0, KEY) == Fragment(0, (), ())


def test_each_of_very_many_rows_has_its_own_streams() -> None:
    """Streams are read as one list of numbers for thousands of rows at a time."""
    first = ROWS[0]
    codings = [structs.replace(first.coding, streams=packed(range(1, 1 + i % 5))) for i in range(9000)]
    chunks = tuple(structs.replace(first, name=f"t{i:04}", coding=coding) for i, coding in enumerate(codings))
    data = Fragment(0, chunks, VALUES).dump()
    assert Fragment.load(data, 0, KEY).chunks == chunks
    found = select(data, 0, KEY, {chunk.name: Sought(tensor=True) for chunk in chunks[::3]})
    assert tuple(found.chunks) == chunks[::3]


@pytest.mark.parametrize("streams", [[0], [-1], [5, 0, 5], [5, None]], ids=str)
def test_an_empty_or_negative_stream_is_damage(streams: list[Any]) -> None:
    with pytest.raises(Damaged, match=KEY):
        Fragment.load(changed(streams=streams), 0, KEY)


def test_rows_are_sorted_by_name_and_offset() -> None:
    rows = pq.read_table(pa.BufferReader(Fragment(0, FRAGMENT.chunks[::-1], VALUES[::-1]).dump())).to_pylist()
    assert [(row["name"], row["offset"]) for row in rows] == [
        ("b", [0, 0]),
        ("b", [2, 0]),
        ("lr", None),
        ("seed", None),
        ("w", [0]),
    ]


def test_rounding_is_recorded_and_old_readers_ignore_it() -> None:
    described = {"w": Rounded("MantissaBits(3)", 0.5, 0.125, 1e9, 1.0, 17)}
    data = replace(FRAGMENT, rounded=described).dump()
    assert Fragment.load(data, 0, KEY).rounded == described
    assert replace(Fragment.load(data, 0, KEY), rounded={}) == FRAGMENT
    assert pq.read_schema(pa.BufferReader(data)).names[: len(SCHEMA)] == SCHEMA.names
    assert described["w"].sqnr == 90.0
    with pytest.raises(Damaged, match="is not a number"):
        Fragment.load(replace(FRAGMENT, rounded={"w": replace(described["w"], error=float("nan"))}).dump(), 0, KEY)


def test_the_schema_on_disk_equals_the_specified_schema() -> None:
    assert pq.read_schema(pa.BufferReader(DATA)).remove_metadata() == SCHEMA


def test_an_unknown_column_is_ignored() -> None:
    assert Fragment.load(changed(schema=SCHEMA.append(pa.field("note", pa.string())), note="x"), 0, KEY) == FRAGMENT


@pytest.mark.parametrize(
    "fields",
    [
        {"base": 7},
        {"transform": ["delta", "planes"]},
        {"transform": ["planes", "rotl1"]},
        {"kind": "sparse"},
        {"dtype": "float128"},
    ],
)
def test_unknown_encodings_raise_unsupported(fields: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match=KEY):
        Fragment.load(changed(**fields), 0, KEY)


@pytest.mark.parametrize("column", [name for name in SCHEMA.names if name not in ("base", "ranks", "value")])
def test_a_null_in_a_chunk_row_is_refused(column: str) -> None:
    with pytest.raises(RaystowError, match=KEY):
        Fragment.load(changed(**{column: None}), 0, KEY)


@pytest.mark.parametrize("column", ["name", "kind"])
@pytest.mark.parametrize("of", ["array", "value"])
def test_a_selection_finds_rows_without_name_or_kind(of: str, column: str) -> None:
    with pytest.raises(Damaged, match=KEY):
        select(changed(of=of, **{column: None}), 0, KEY, {})


@pytest.mark.parametrize("column", ["name", "path", "value", "ranks"])
def test_a_null_in_a_value_row_is_damage(column: str) -> None:
    with pytest.raises(Damaged, match=KEY):
        Fragment.load(changed(of="value", **{column: None}), 0, KEY)


@pytest.mark.parametrize(
    "fields",
    [
        {"offset": [-1]},
        {"extent": [6001]},
        {"extent": [-1]},
        {"offset": [1]},
        {"shape": [6000, 1]},
        {"shape": [5999]},
        {"shape": [2**62], "extent": [2**62]},
        {"shape": [1 << 27], "extent": [1 << 27]},
        {"offset": [None]},
        {"start": -1},
        {"pack": -1},
        {"stored": [-1]},
        {"stored": []},
        {"stored": [None]},
        {"stored": [1 << 40]},
        {"streams": [None]},
        {"codecs": [None]},
    ],
    ids=str,
)
def test_an_invalid_number_is_damage(fields: dict[str, Any]) -> None:
    with pytest.raises(Damaged, match=KEY):
        Fragment.load(changed(**fields), 0, KEY)


@pytest.mark.parametrize("ranks", [[], [-1], [None]], ids=str)
def test_invalid_ranks_are_damage(ranks: list[Any]) -> None:
    with pytest.raises(Damaged, match=KEY):
        Fragment.load(changed(of="value", ranks=ranks), 0, KEY)


@pytest.mark.parametrize("data", [b"", b"PAR1", DATA[:-1], DATA[100:], b"x" * 5000], ids=len)
def test_data_that_is_not_parquet_is_damage(data: bytes) -> None:
    with pytest.raises(Damaged, match=KEY):
        Fragment.load(data, 0, KEY)


@pytest.mark.parametrize("column", SCHEMA.names)
def test_a_column_of_another_type_is_damage(column: str) -> None:
    other = pa.list_(pa.list_(pa.bool_()))
    schema = pa.schema([field.with_type(other) if field.name == column else field for field in SCHEMA])
    rows = [{**row, column: None} for row in pq.read_table(pa.BufferReader(DATA)).to_pylist()]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema), sink)
    with pytest.raises(Damaged, match=KEY):
        Fragment.load(sink.getvalue(), 0, KEY)


def test_a_path_of_too_many_parts_is_damage() -> None:
    """Its names together would grow with the square of its parts."""
    longest = ("x",) * MAX_DEPTH
    assert parse_path(path_text(longest)) == longest
    with pytest.raises(Damaged, match="not a path"):
        parse_path(path_text((*longest, "x")))
