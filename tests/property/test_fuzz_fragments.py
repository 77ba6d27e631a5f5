"""A manifest fragment with arbitrary content and a valid digest is read as values or raises a raystow error.

The inputs are rows with hostile values, written by pyarrow, files with changed bytes, and pages with wrong headers.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzz.seeds import fragments, packs, row, value_row
from fuzz.targets import TARGETS, allowed
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.storage.errors import Damaged, StateError, Unsupported
from raystow.storage.format.manifest import SCHEMA, Fragment, Value
from raystow.storage.limits import MAX_NAME

FOUND = sorted((Path(__file__).parents[1] / "fuzz" / "found").iterdir())
checked = settings(max_examples=30, deadline=10_000)
"""Settings with a time-out of 10 seconds for each input."""

NUMBERS = [-(2**63), -(2**31), -1, 0, 1, 2, 4, 8, 2**27, 2**31 - 1, 2**31, 2**32, 2**48, 10**18, 2**62, 2**63 - 1]
TEXTS = ["", "w", "lr", "../../x", "/etc/passwd", "\0", "a" * 100_000, "é", "{" * 2000, "[" * 2000, "1e999", '{"complex": [1.0]}']
number, text = st.sampled_from(NUMBERS) | st.integers(-(2**63), 2**63 - 1), st.sampled_from(TEXTS) | st.text(max_size=5)
small = st.sampled_from([n for n in NUMBERS if -(2**31) <= n < 2**31])
shapes = st.lists(number, max_size=4) | st.sampled_from(
    [[0, 10**18], [2**31] * 3, [1] * 65, [1] * 64, [2**21] * 3, [0] + [2**62] * 3]
)
HOSTILE: dict[str, st.SearchStrategy[Any]] = {
    "name": text,
    "path": text,
    "kind": st.sampled_from(["tensor", "array", "scalar", "value", "sparse", ""]),
    "ranks": st.lists(small, max_size=3),
    "value": text,
    "dtype": st.sampled_from(["float32", "bfloat16", "bool", "complex128", "int1", "complex32", "float128", ""]),
    "shape": shapes,
    "offset": shapes,
    "extent": shapes,
    "group": st.sampled_from(["weights", "../x", "a" * 33, "optimizer", ""]),
    "pack": small,
    "start": number,
    "base": number,
    "transform": st.sampled_from([[], ["planes"], ["rotl1", "planes"], ["planes"] * 1000, ["xor"]]),
    "codecs": st.lists(st.sampled_from(["raw", "zstd", "deflate", "pack7", "ans", "lzw"]), max_size=5),
    "stored": st.lists(number, max_size=5),
    "stream": small,
    "streams": st.lists(small, max_size=5),
    "raw_digest": st.integers(0, 2**64 - 1),
    "stored_digest": st.binary(min_size=32, max_size=32),
}


def written(rows: list[dict[str, Any]], schema: pa.Schema = SCHEMA, **options: Any) -> bytes:
    """Return a Parquet file of these rows."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema), sink, **options)
    return sink.getvalue()


@st.composite
def hostile_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Return rows that are valid except for a few fields."""
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        fields = draw(st.lists(st.sampled_from(list(HOSTILE)), max_size=3, unique=True))
        changes = {name: draw(st.none() | HOSTILE[name]) for name in fields}
        box = draw(st.sampled_from(["as it is", "the same in all", "half"]))
        if box == "the same in all" and "shape" in changes:
            changes |= {"extent": changes["shape"], "offset": [0] * len(changes["shape"] or ())}
        if box == "half":
            changes |= {"extent": [1, 4], "offset": [draw(st.integers(0, 1)), 0], "stored": [16]}
        rows.append(draw(st.sampled_from([row, value_row]))(**changes))
    return rows


@checked
@given(rows=hostile_rows())
def test_hostile_rows_raise_only_raystow_errors(rows: list[dict[str, Any]]) -> None:
    data = written(rows)
    allowed(lambda: TARGETS["fragment"](data))
    allowed(lambda: TARGETS["pack_sizes"](data))


@checked
@given(data=st.data())
def test_changed_bytes_raise_only_raystow_errors(data: st.DataObject) -> None:
    """Half of the changes are in the footer, which the Parquet library trusts."""
    seed = bytearray(data.draw(st.sampled_from(fragments())))
    footer = len(seed) - 8 - int.from_bytes(seed[-8:-4], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(seed) - 1) | st.integers(footer, len(seed) - 1))
        seed[at] = data.draw(st.sampled_from([0, 1, 127, 128, 255, seed[at] ^ 1, seed[at] ^ 128]) | st.integers(0, 255))
    allowed(lambda: TARGETS["fragment"](bytes(seed)))
    allowed(lambda: TARGETS["pack_sizes"](bytes(seed)))


@checked
@given(data=st.binary(max_size=300), ends=st.sampled_from([b"", b"PAR1"]))
def test_arbitrary_bytes_raise_only_raystow_errors(data: bytes, ends: bytes) -> None:
    allowed(lambda: TARGETS["fragment"](ends + data + ends))


TYPES = [pa.int8(), pa.float64(), pa.large_string(), pa.binary(), pa.bool_(), pa.date32(), pa.decimal128(20, 3), pa.binary(7)]
TYPES += [pa.list_(pa.int64()), pa.large_list(pa.string()), pa.struct([("a", pa.int64())]), pa.map_(pa.string(), pa.int64())]
TYPES += [pa.list_(pa.int64(), 2), pa.dictionary(pa.int32(), pa.string()), pa.timestamp("ns"), pa.list_(pa.list_(pa.string()))]
VALUES: dict[str, Any] = {"int8": 1, "double": 1.5, "bool": True}


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_a_wrong_column_type_raises_only_raystow_errors(kind: pa.DataType) -> None:
    for name in SCHEMA.names:
        schema = pa.schema([pa.field(f.name, kind if f.name == name else f.type) for f in SCHEMA])
        for value in (None, VALUES.get(str(kind))):
            data = written([row(**{name: value}), value_row(**{name: value})], schema)
            allowed(lambda data=data: TARGETS["fragment"](data))


@pytest.mark.parametrize(
    "options",
    [
        {"row_group_size": 1},
        {"compression": "none"},
        {"compression": "gzip"},
        {"compression": "snappy"},
        {"use_dictionary": False},
        {"data_page_version": "2.0"},
        {"data_page_size": 10},
        {"version": "1.0", "schema": SCHEMA},
        {"schema": pa.schema([pa.field(f.name, pa.large_string()) if f.type == pa.string() else f for f in SCHEMA])},
        {"use_compliant_nested_type": False},
        {"store_schema": False},
        {"write_page_index": True},
        {"write_page_checksum": True},
        {"write_statistics": False},
    ],
    ids=str,
)
def test_options_of_other_parquet_writers_are_read(options: dict[str, Any]) -> None:
    rows = [row(name=f"w{i}", path=f'["w{i}"]') for i in range(30)] + [value_row()]
    data = written(rows, **{"schema": SCHEMA, **options})
    assert Fragment.load(data, 0, "x") == Fragment.load(written(rows), 0, "x")


@pytest.mark.parametrize("name", SCHEMA.names)
def test_a_missing_or_repeated_column_is_rejected(name: str) -> None:
    table = pa.Table.from_pylist([row(), value_row()], SCHEMA)
    at = SCHEMA.get_field_index(name)
    for changed in (table.remove_column(at), table.append_column(name, table.column(at))):
        sink = io.BytesIO()
        pq.write_table(changed, sink)
        assert not allowed(lambda sink=sink: Fragment.load(sink.getvalue(), 0, "x"))


@checked
@given(data=st.data())
def test_a_changed_chunk_raises_only_raystow_errors(data: st.DataObject) -> None:
    seed = bytearray(data.draw(st.sampled_from(packs())))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(seed) - 1) | st.integers(0, seed.index(b"\n")))
        seed[at : at + data.draw(st.integers(0, 1))] = data.draw(
            st.binary(max_size=2) | st.sampled_from([b"0", b"9", b"-", b"1,"])
        )
    allowed(lambda: TARGETS["pack"](bytes(seed)))


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.name)
def test_inputs_found_by_fuzzing_raise_only_raystow_errors(path: Path) -> None:
    allowed(lambda: TARGETS[path.name.partition("-")[0]](path.read_bytes()))


def test_delta_encoded_texts_are_rejected() -> None:
    """The decoded size can grow with the square of the page size and is unknown before the decoding."""
    options = {"use_dictionary": False, "column_encoding": {"value": "DELTA_BYTE_ARRAY"}}
    with pytest.raises(Unsupported, match="DELTA_BYTE_ARRAY"):
        Fragment.load(written([value_row()], **options), 0, "x")


@pytest.mark.parametrize("said", [b"\x04", b"\x00", b"\x01", b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\xff\x1f"], ids=bytes.hex)
def test_a_page_with_a_wrong_value_count_is_rejected(said: bytes) -> None:
    """The library trusts the page header: 30 bytes can declare two billion values of a column."""
    right = b"\x2c\x15\x02\x15"  # field 5, the header of a data page; its field 1: one value
    data = written([value_row()], use_dictionary=False, compression="none", write_statistics=False)
    assert right in data
    changed = data.replace(right, right[:2] + said + right[3:], 1)
    with pytest.raises(Damaged):
        Fragment.load(changed, 0, "x")


def test_a_writer_rejects_a_name_that_is_too_long() -> None:
    name = "x" * (MAX_NAME + 1)
    assert Fragment.load(Fragment(0, (), (Value(name[1:], "[]", "1", (0,)),)).dump(), 0, "x").values[0].name == name[1:]
    with pytest.raises(StateError, match="characters"):
        Fragment(0, (), (Value(name, "[]", "1", (0,)),)).dump()


@pytest.mark.parametrize("shape", [[0, 2**40, 2**40], [2**62, 2**62, 0], [1] * 65], ids=str)
def test_an_empty_tensor_of_a_huge_shape_raises_damaged(shape: list[int]) -> None:
    """Regression: numpy multiplies the dimensions that are not zero and raised an error that is not a raystow error."""
    data = written([row(shape=shape, offset=[0] * len(shape), extent=shape, stored=[0])])
    with pytest.raises(Damaged):
        Fragment.load(data, 0, "x")
