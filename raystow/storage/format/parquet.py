"""Reads Parquet files that may be hostile.

A Parquet library takes memory by what a file *says*: 50 bytes can say that a value is repeated two billion times, or that a page
decompresses to 2 GiB, and the footer is not compared with the pages. So the headers of all pages are summed up before a column is
read, and what exceeds the limits is refused. Texts are read as dictionaries, and resolved when their total size is known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..errors import Damaged, Unsupported
from ..limits import MAX_FOOTER, MAX_FRAGMENT, MAX_PAGES, MAX_ROWS, most_cells, most_text
from .thrift import I32, I64, Scanner, Struct, count, integer, structs, substruct

# Numbers of parquet.thrift.
_DELTA_BYTE_ARRAY = 7  # each text as a part of the one before: a page can grow with the square of its size
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_OWN = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}  # the field with the header of this type of page
_ENCODING = {_DATA: 2, _DICTIONARY: 2, _DATA_V2: 4}


def texts(values: Collection[str]) -> pa.StringArray:
    """An array of texts. ``pa.array`` would import pandas, where it is installed, which takes longer than to read a manifest."""
    encoded = [value.encode() for value in values]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), len(encoded), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))])


def integers(values: Sequence[int]) -> pa.Int64Array:
    """An array of int64; see ``texts``."""
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(np.array(values, np.int64))])


def tables(data: bytes, schema: pa.Schema) -> Iterator[pa.Table]:
    """The columns of ``schema``, one row group at a time; other columns are ignored.

    Raises ``Damaged``, ``Unsupported``, what pyarrow raises, and ``ValueError`` for texts that are not UTF-8. Takes a few times
    ``most_text`` and 8 bytes for each of ``most_cells``, whatever the file says.
    """
    most = most_text(len(data))
    dictionaries = [leaf.path for leaf in check(data, schema) if leaf.physical_type == "BYTE_ARRAY"]
    file = pq.ParquetFile(pa.BufferReader(data), read_dictionary=dictionaries, pre_buffer=False)
    text = 0
    for group in range(file.num_row_groups):  # pyarrow cannot read lists of dictionaries of several at once
        table = file.read_row_group(group, schema.names, use_threads=False).select(schema.names)
        text += sum(_text(chunk) for column in table.columns for chunk in column.chunks)
        if text > most:
            raise Damaged(f"the texts of all rows take more than {most} bytes")
        yield table.cast(schema)


def check(data: bytes, schema: pa.Schema) -> list[pq.ColumnSchema]:
    """The columns, each element of a nested one by itself. Raises ``Damaged`` if the file exceeds the limits. The footer is
    parsed here, since invalid metadata of a column ends the process in pyarrow."""
    most_values, most_bytes = most_cells(len(data)), most_text(len(data))
    size = int.from_bytes(data[-8:-4], "little")
    if len(data) > MAX_FRAGMENT or len(data) < size + 12 or size > MAX_FOOTER or data[-4:] != b"PAR1":
        raise Damaged(f"not a Parquet file, or one of more than {MAX_FRAGMENT} bytes or with a footer of more than {MAX_FOOTER}")
    groups = structs(Scanner(data, len(data) - 8 - size, len(data) - 8).struct(), 4)
    columns = pq.ParquetFile(pa.BufferReader(data)).schema
    leaves = [columns.column(i) for i in range(len(columns))]
    required = [(i, leaf) for i, leaf in enumerate(leaves) if leaf.path.partition(".")[0] in schema.names]
    rows = pages = cells = nbytes = 0
    for group in groups:
        parts = structs(group, 1)
        rows += count(group, 3, I64)
        if rows > MAX_ROWS or len(parts) != len(leaves):
            raise Damaged(f"more than {MAX_ROWS} rows, or a row without some of its columns")
        for i, leaf in required:
            pages += 1  # a column without pages costs time, too
            for size, values in _pages(data, substruct(parts[i], 3)):
                pages, cells, nbytes = pages + 1, cells + values, nbytes + size + values * (leaf.length or 0)
                if pages > MAX_PAGES or cells > most_values or nbytes > most_bytes:
                    raise Damaged(f"with column {leaf.path!r:.60} there are more pages, values or bytes than the limits allow")
    return leaves


def _pages(data: bytes, column: Struct) -> Iterator[tuple[int, int]]:
    """For each page of a column its decompressed size and the number of its values."""
    left, first, dictionary = count(column, 5, I64), count(column, 9, I64), integer(column, 11, I64) or 0
    if left == 0:
        return  # no page is read then
    start = min(first, dictionary) if dictionary > 0 else first
    end = start + count(column, 7, I64)
    if end > len(data):
        raise Damaged("a column is outside the file")
    scanner = Scanner(data, start, end)
    while scanner.at < end:
        header = scanner.struct()
        kind, size, packed = (count(header, field, I32) for field in (1, 2, 3))
        values = 0
        if kind in _OWN:
            own = substruct(header, _OWN[kind])
            values = count(own, 1, I32)
            if integer(own, _ENCODING[kind], I32) == _DELTA_BYTE_ARRAY:
                raise Unsupported("texts that are stored as pieces of one another (DELTA_BYTE_ARRAY)")
        left -= values if kind in (_DATA, _DATA_V2) else 0
        scanner.at += packed
        yield size, values
    if scanner.at != end or left:
        raise Damaged("the pages of a column are not what the footer says of them")


def _text(array: pa.Array) -> int:
    """Bytes of all texts in an array, dictionary entries as often as they are used."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return pc.sum(pc.binary_length(array.dictionary).cast(pa.int64()).take(array.indices)).as_py() or 0
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _text(array.flatten())
    if pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind):
        return 0
    raise Damaged(f"a column of type {kind}")
