"""Finds float32 values on the GPU that are bfloat16 values times one number, and replaces them by these, in place."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch

from .. import kernel_args
from . import copy_kernels
from .constants import CHECK, NARROW
from .library import Kernel

_CHECK, _NARROW = Kernel("bfloat16.check"), Kernel("bfloat16.narrow")


def check(tensors: Sequence[torch.Tensor], factor: float) -> torch.Tensor:
    """Return, for each contiguous float32 tensor, whether a value is not zero, and whether one is not such a product.

    Args:
        tensors: At least one.
        factor: A number that float32 can hold.

    Returns:
        int64 [tensors, 2] in pinned memory, complete once the current stream has come so far.
    """
    table = _table(tensors)
    found = torch.zeros((len(tensors), 2), dtype=torch.int64, device=tensors[0].device)
    largest = max(map(torch.numel, tensors))
    for rows, results in kernel_args.in_parts((table, 2), (found, 2)):
        _CHECK.launch((-(-largest // CHECK["SPAN"]), len(rows)), rows, results, _bits(factor), **CHECK)
    return copy_kernels.to_host(found)


def narrow(tensors: Sequence[torch.Tensor], factor: float) -> list[torch.Tensor]:
    """Return the bfloat16 values of float32 tensors that are such products; they take the first half of the tensors' memory.

    The values of a launch overwrite those that the launches before have read: each reads at most as many as all before it.
    """
    ordered = sorted(tensors, key=torch.numel, reverse=True)
    table, first, last = _table(ordered), 0, NARROW["SPAN"]
    while ordered and ordered[0].numel() > first:
        rows = sum(one.numel() > first for one in ordered)
        _NARROW.launch((rows, -(-(last - first) // NARROW["SPAN"])), table, _bits(factor), first, last, **NARROW)
        first, last = last, min(2 * last, last + kernel_args.MOST_ROWS * NARROW["SPAN"])
    return [one.reshape(-1).view(torch.bfloat16)[: one.numel()] for one in tensors]


def _table(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    rows = np.array([(one.data_ptr(), one.numel()) for one in tensors], np.int64)
    return kernel_args.upload(rows, tensors[0].device)


def _bits(factor: float) -> int:
    """Return the bits of a float32 number."""
    (bits,) = struct.unpack("<i", struct.pack("<f", factor))
    return int(bits)
