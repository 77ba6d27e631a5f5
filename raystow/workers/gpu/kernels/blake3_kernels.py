"""BLAKE3 of many ranges of device memory at once: ``coding.digest.stored_digest`` of bytes just copied to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ..kernel_args import Addressed, Table
from .constants import BLAKE3, LEAF
from .library import Kernel

PAST = 8
"""Bytes after a range that may be read and are ignored."""

_LEAVES, _TREE = Kernel("blake3.leaves"), Kernel("blake3.tree")


def stored_digests(table: Table, sizes: Sequence[int], digests: Table, scratch: torch.Tensor) -> None:
    """Compute the digests of ranges of device memory, on the current stream, into ``digests`` (uint32, 8 for each range).

    ``table``: the result of ``table_of``, on the device; ``sizes``: at least 1 each. Up to ``PAST`` bytes after each range must
    be readable. ``scratch``: ``scratch_of(sizes)`` bytes.
    """
    if not sizes:
        return
    values = Addressed(scratch.data_ptr(), 0, table.device, torch.uint32)
    others = replace(values, address=values.address + scratch_of(sizes) // 2)
    _LEAVES.launch((-(-max(sizes) // (LEAF * BLAKE3["LANES"])), len(sizes)), table, values, **BLAKE3)
    _TREE.launch((len(sizes),), table, values, others, digests, **BLAKE3)


def scratch_of(sizes: Sequence[int]) -> int:
    """Return the bytes of two values for each leaf."""
    return 2 * 32 * sum(-(-size // LEAF) for size in sizes)


def table_of(addresses: Sequence[int], sizes: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return a row for each range: address, bytes, number of its first leaf."""
    leaves = -(-np.array(sizes, np.int64) // LEAF)
    return np.stack((np.array(addresses, np.int64), np.array(sizes, np.int64), np.cumsum(leaves) - leaves), axis=1)
