"""BLAKE3 of many ranges of device memory at once: ``coding.digest.stored_digest`` of what is stored.

A table has a row for each range: its address, its bytes, the number of its first leaf among the values, and how many leaves of
the same object are before it. A leaf has ``LEAF`` bytes, and a value ``VALUE``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from ..kernel_args import Addressed, Table, in_parts
from .constants import BLAKE3, LEAF
from .library import Kernel

VALUE = 32
"""Bytes of a leaf's value, and of a digest."""

_LEAVES, _TREE = Kernel("blake3.leaves"), Kernel("blake3.tree")


def stored_digests(table: Table, sizes: Sequence[int], digests: Table, scratch: torch.Tensor) -> None:
    """Compute the digests of whole objects, on the current stream, into ``digests`` (uint32, 8 for each).

    ``table``: the result of ``table_of``, on the device; ``sizes``: at least 1 each. ``scratch``: ``scratch_of(sizes)`` bytes.
    """
    if not sizes:
        return
    values = Addressed(scratch.data_ptr(), 0, table.device, torch.uint32)
    others = replace(values, address=values.address + scratch_of(sizes) // 2)
    leaves(table, max(sizes), values)
    tree(table, values, others, digests)


def leaves(table: Table, largest: int, values: Table) -> None:
    """Compute the values of all leaves. ``largest``: the most bytes of a range. If an object has several ranges, all but the last
    one must be whole leaves, and the first one several of them."""
    for (rows,) in in_parts((table, 4)):
        _LEAVES.launch((-(-largest // (LEAF * BLAKE3["LANES"])), len(rows)), rows, values, **BLAKE3)


def tree(table: Table, values: Table, others: Table, digests: Table) -> None:
    """Compute digests from the values of leaves. A row stands for a whole object here, whose address is not read. ``others``:
    memory like that of ``values``; both are overwritten."""
    _TREE.launch((len(table),), table, values, others, digests, **BLAKE3)


def leaf_count(nbytes: int) -> int:
    """Return how many leaves so many bytes have."""
    return -(-nbytes // LEAF)


def scratch_of(sizes: Sequence[int]) -> int:
    """Return the bytes of two values for each leaf."""
    return 2 * VALUE * sum(map(leaf_count, sizes))


def table_of(addresses: Sequence[int], sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the table of whole objects, whose leaves follow each other."""
    counts = np.array([leaf_count(size) for size in sizes], np.int64)
    rows = np.array(addresses, np.int64), np.array(sizes, np.int64), np.cumsum(counts) - counts, np.zeros_like(counts)
    return np.stack(rows, axis=1)
