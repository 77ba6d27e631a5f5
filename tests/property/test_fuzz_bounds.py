"""Small inputs that declare gigabytes and inputs that are slow to parse: each ends within bounds of time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from fuzz.seeds import ENTRY, ROOT, planned, row, value_row
from fuzz.targets import ID, body, described

from raystow.storage import limits
from raystow.storage.coding.chunk import Coding, packed
from raystow.storage.format import boxes
from raystow.storage.format.manifest import SCHEMA
from raystow.storage.format.root import Root

MIB = 1 << 20
PLAIN = {"write_statistics": False, "store_schema": False}
SECONDS = 10
"""Upper bound of the processor time of each bomb."""


def table(rows: int, base: dict[str, Any], **columns: pa.Array) -> pa.Table:
    """Return a table that repeats one row, with some columns replaced."""
    one = pa.Table.from_pylist([base], SCHEMA)
    zeros = pa.array(np.zeros(rows, np.int32))
    return pa.table([columns.get(name, one.column(name).combine_chunks().take(zeros)) for name in SCHEMA.names], SCHEMA.names)


def long_text_in_every_row(path: Path) -> None:
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(200_000, np.int32)), pa.array(["x" * MIB]))
    pq.write_table(table(200_000, value_row(), value=texts), path)


def long_text_in_every_list(path: Path) -> None:
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(200_000, np.int32)), pa.array(["x" * MIB]))
    pq.write_table(table(1, row(), codecs=pa.ListArray.from_arrays([0, 200_000], texts)), path)


def one_list_of_all_elements(path: Path) -> None:
    elements = pa.nulls(limits.MAX_CELLS, pa.int32())
    pq.write_table(table(1, row(), streams=pa.ListArray.from_arrays([0, limits.MAX_CELLS], elements)), path, **PLAIN)


def more_rows_than_allowed(path: Path) -> None:
    rows = limits.MAX_ROWS + 1
    pq.write_table(pa.table([pa.nulls(rows, field.type) for field in SCHEMA], schema=SCHEMA), path)


def pages_of_text_that_expands(path: Path) -> None:
    one = pa.Table.from_pylist([value_row(value="x" * (64 * MIB))], SCHEMA)
    with pq.ParquetWriter(path, SCHEMA, compression="zstd", use_dictionary=False, **PLAIN) as writer:
        for _ in range(limits.MAX_TEXT // (64 * MIB) + 1):
            writer.write_table(one)


def many_tiny_pages(path: Path) -> None:
    many = pa.Table.from_pylist([value_row()] * (limits.MAX_PAGES // 20 + 20), SCHEMA)
    pq.write_table(many, path, data_page_size=1, write_batch_size=1, use_dictionary=False, write_statistics=False)


def a_name_of_64_mib(path: Path) -> None:
    one = pa.Table.from_pylist([row(name="x" * (64 * MIB))], SCHEMA)
    pq.write_table(one, path, compression="zstd", use_dictionary=False, **PLAIN)


def many_columns(path: Path) -> None:
    pq.write_table(pa.table({f"c{i}": [1] for i in range(5_000)}), path)


def shape_beyond_int64(path: Path) -> None:
    rows = [row(shape=[2**62] * 64, offset=[0] * 64, extent=[0] + [1] * 63), row(name="v", shape=[2**62] * 100_000)]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path)


def a_chunk_declared_to_be_huge(path: Path) -> None:
    rows = [row(name=f"w{i}", shape=[2**26], offset=[0], extent=[2**26], stored=[2**28]) for i in range(100)]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path)


def overlapping_rows(path: Path) -> None:
    rows = [row(shape=[4, 4], offset=[i, 0], extent=[2, 4]) for i in (0, 1)] * 5000
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path)


def boxes_that_no_plane_separates(path: Path) -> None:
    n = 30_000
    rows = [row(shape=[n, n], offset=[i, n - 1 - i], extent=[1, 1], stored=[4]) for i in range(n)]
    rows += [row(shape=[n, n], offset=[0, 0], extent=[n, n], stored=[4])]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path)


def a_zstd_stream_that_expands(path: Path) -> None:
    frame = zstandard.compress(bytes(256 * MIB))
    path.write_bytes(described(Coding(False, False, ("zstd",), (len(frame),), packed([len(frame)]), 4096), "uint8", 4096, frame))


def a_deflate_stream_that_expands(path: Path) -> None:
    deflater = zlib.compressobj(1, zlib.DEFLATED, -15)
    frame = deflater.compress(bytes(64 * MIB)) + deflater.flush()
    path.write_bytes(
        described(Coding(False, False, ("deflate",), (len(frame),), packed([len(frame)]), 4096), "uint8", 4096, frame)
    )


def streams_of_one_byte(path: Path) -> None:
    path.write_bytes(described(Coding(False, False, ("deflate",), (MIB,), packed((1,) * MIB), 1), "uint8", MIB, b"\3" * MIB))


def many_small_objects_in_a_root(path: Path) -> None:
    path.write_bytes(ROOT.dump().partition(b"\n")[2].rstrip(b"}\n") + b',"x":[' + b"{}," * (6 * MIB) + b"0]}")


def versions_that_are_missing(path: Path) -> None:
    entries = (replace(ENTRY, id=id, bases=(id - 1,) if id % 2 == 0 else ()) for id in range(1, 20_001))
    path.write_bytes(body(Root(ID, next_id=20_001, versions=tuple(entries)).dump()))


def a_record_of_a_thousand_million_ranks(path: Path) -> None:
    path.write_bytes(body(planned(10**9 - 1).dump()))


def small_lists_among_values(path: Path) -> None:
    path.write_bytes(b'["l",[' + b"[]," * (8 * MIB) + b"0]]")


def small_objects_in_a_header(path: Path) -> None:
    path.write_bytes(b'{"w":[' + b"{}," * (8 * MIB) + b"0]}")


def many_small_lists_in_a_value(path: Path) -> None:
    path.write_bytes(b"[" + b"[]," * (8 * MIB) + b"0]")


def digits_of_a_value(path: Path) -> None:
    path.write_bytes(b"1" * (8 * MIB))


def a_key_of_a_million_digits(path: Path) -> None:
    path.write_bytes(b"leases/" + b"1" * MIB + b"-" + b"0" * 16 + b"-" + b"0" * 16 + b".json")


BOMBS: dict[Callable[[Path], None], tuple[str, int]] = {
    long_text_in_every_row: ("fragment", 128),
    long_text_in_every_list: ("fragment", 64),
    one_list_of_all_elements: ("fragment", 32),
    more_rows_than_allowed: ("fragment", 32),
    pages_of_text_that_expands: ("fragment", 32),
    many_tiny_pages: ("fragment", 128),
    a_name_of_64_mib: ("fragment", 512),
    many_columns: ("fragment", 64),
    shape_beyond_int64: ("fragment", 64),
    a_chunk_declared_to_be_huge: ("fragment", 64),
    overlapping_rows: ("fragment", 128),
    boxes_that_no_plane_separates: ("fragment", 128),
    a_zstd_stream_that_expands: ("pack", 32),
    a_deflate_stream_that_expands: ("pack", 32),
    streams_of_one_byte: ("pack", 128),
    many_small_objects_in_a_root: ("root", 128),
    versions_that_are_missing: ("prune", 128),
    a_record_of_a_thousand_million_ranks: ("plan", 32),
    small_lists_among_values: ("value_text", 128),
    small_objects_in_a_header: ("safetensors", 128),
    many_small_lists_in_a_value: ("value", 128),
    digits_of_a_value: ("value", 64),
    a_key_of_a_million_digits: ("key", 32),
}
"""Writer of a file -> its fuzz target, and the upper bound of its memory in MiB."""


@pytest.fixture(scope="module")
def took(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Run all bombs in one process with bounded memory; return the resources of each, by its name."""
    folder = tmp_path_factory.mktemp("bombs")
    arguments = []
    for make, (target, _) in BOMBS.items():
        make(folder / make.__name__)
        arguments += [target, str(folder / make.__name__)]
    script = Path(__file__).parents[1] / "fuzz" / "bounded.py"
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=300)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(BOMBS), f"ended after {lines[-1:]}: {done.stderr[-3000:]}"
    return {Path(line["file"]).name: line for line in lines}


@pytest.mark.long
@pytest.mark.parametrize("bomb", BOMBS, ids=lambda make: make.__name__)
def test_each_bomb_stays_within_time_and_memory(took: dict[str, dict[str, Any]], bomb: Callable[[Path], None]) -> None:
    found, (target, most) = took[bomb.__name__], BOMBS[bomb]
    assert found["seconds"] < SECONDS
    assert found["bytes"] < most * MIB
    assert not found["whole"] or target in ("prune", "key")


def spiral(turns: int) -> list[boxes.Box]:
    """Return boxes that form a spiral: a plane can separate only the outermost box from all others."""
    low, high, cut = [0, 0], [8 * turns, 8 * turns], []
    for turn in range(4 * turns):
        axis, extent = turn % 2, [high[0] - low[0], high[1] - low[1]]
        extent[axis], offset = 1, list(low)
        if turn % 4 < 2:
            low[axis] += 1
        else:
            high[axis] -= 1
            offset[axis] = high[axis]
        cut.append((tuple(offset), tuple(extent)))
    return [*cut, (tuple(low), (high[0] - low[0], high[1] - low[1]))]


def test_a_spiral_of_boxes_tiles_a_tensor() -> None:
    """Regression: no plane separates more than one of the thousands of boxes, so recursion raised a RecursionError."""
    cut, whole = spiral(2000), ((0, 0), (16_000, 16_000))
    assert boxes.tile(cut, whole)
    assert not boxes.tile([*cut[:-1], cut[0]], whole)


def test_an_overlap_as_large_as_a_gap_is_no_tiling() -> None:
    cut = [((0, 0), (2, 4)), ((1, 0), (2, 4)), ((2, 0), (1, 4)), ((3, 0), (1, 4))]
    assert not boxes.tile([cut[0], cut[1]], ((0, 0), (4, 4)))
    assert boxes.tile([cut[0], cut[2], cut[3]], ((0, 0), (4, 4)))
    assert not boxes.tile([((), ()), ((), ())], ((), ()))
