"""Every bound on stored values that a reader checks before it takes memory or time for them.

They are part of the format: a reader accepts everything up to them, and a writer refuses to write more. A test compares this
module with the table in docs/spec/format-v1.md. Sizes are bytes.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_MARKER = 64 << 10
"""The marker: one id, and the public keys that a repository may ask for."""

MAX_ROOT = 64 << 20
"""The root: about 260,000 versions."""

MAX_RECORD = 64 << 20
"""A version record: about a million ranks, 8 on a node."""

MAX_ITEMS = 1 << 22
"""Elements and containers of a JSON text, which take up to 200 bytes each as objects, and strings not more than they say."""

MAX_DEPTH = 128
"""Parts of a path; a state has at most 100 containers inside each other."""

MAX_SIGNATURE = 4 << 10
"""The signature of a version or of a segment."""

MAX_SEGMENT = 64 << 20
"""The record of a segment of the step journal: about 300,000 entries."""

MAX_SEGMENTS = 4096
"""Segments in the root, all of which a replay may have to read."""

MAX_FRAGMENT = 1 << 30
"""A manifest fragment as a file."""

MAX_FOOTER = 1 << 20
"""A fragment's Parquet footer: it is parsed before anything in it can be checked. raystow's take 5 KiB for a million rows."""

MAX_PAGES = 1 << 16
"""Pages in the columns of a fragment: their headers are walked one by one before a column is read."""

MAX_ROWS = 1 << 20
"""Rows of a fragment: the chunks and values of one node, of raystow's chunks 4 TiB."""

MAX_CELLS = 1 << 26
"""Entries of all columns of a fragment, each element of a list for itself: a run-length code makes millions of a few bytes."""

MAX_TEXT = 1 << 30
"""A fragment after decompression, and its texts after their dictionaries were resolved."""

MAX_NAME = 64 << 10
"""Characters of a tensor's name, and of its path."""


def most_cells(size: int) -> int:
    """The entries of all columns of a fragment of ``size`` bytes: so a few bytes that repeat take little memory, whatever the
    record says of them."""
    return min(MAX_CELLS, (1 << 20) + 64 * size)


def most_text(size: int) -> int:
    """The bytes of such a fragment's pages after decompression, and of its texts."""
    return min(MAX_TEXT, (64 << 20) + 64 * size)


MAX_DIMENSIONS = 64
"""Dimensions of a tensor: as many as torch and numpy have."""

MAX_TENSOR = (1 << 63) - 1
"""A tensor's bytes; of an empty one, those without the zeros in its shape, which numpy checks."""

MAX_CHUNK = 256 << 20
"""What a chunk decodes to."""

MAX_STORED_CHUNK = 512 << 20
"""What a chunk takes in its pack."""

MAX_INTEGER = (1 << 63) - 1
"""An integer in a record, among them the size of a pack."""

MAX_TIME = 253_402_300_799
"""A time in a record, in seconds since 1970: the end of the year 9999, the calendar's end."""

MAX_DIGITS = 1 << 20
"""Hexadecimal digits of an integer beyond 64 bits among the values."""

MAX_NUMBER = 10**9 - 1
"""The number of a node, of a rank and of a pack."""

MAX_CHAIN = 12
"""Versions of a chain of deltas, the one that is read among them."""

MAX_DIFFERENCES = 32
"""Differences between ranks in a record."""

MAX_PARTS = 1024
"""Parts of a version."""

MAX_SIDE = 64
"""Ranks of each side of a difference in a record."""

Text = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
"""A name, a path, an address, or an explanation."""

Digest = Annotated[int, msgspec.Meta(ge=0)]
"""An unsigned integer of 64 bits."""

Shape = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
"""One number for each dimension of a tensor."""
