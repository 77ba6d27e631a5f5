"""What the kernels are told: a table in device memory with a row for each chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

ANYWHERE = (
    *("table", "digests", "samples", "odds", "rounded_digests", "nans", "misses"),
    *("source", "target", "owners", "addresses", "planes", "out", "sizes", "lengths", "others"),
    *("sources", "targets", "coded", "n", "base", "streams", "times"),
)
"""Arguments of kernels that may lie at any multiple of eight bytes, or be any number. Triton compiles a kernel anew for each way
in which addresses and numbers of those that it has met can be divided by 16, or are 1, unless it is told not to
(``do_not_specialize``): for half a second, in the midst of a save. What they lead to is read by addresses in tables, anyway."""

COLUMNS = 10
"""A row of ``kernels.split`` and ``join``: address of the words, number of words, addresses of up to eight planes."""

_ADDRESSES = np.arange(COLUMNS) != 1


def can_pack(rows: Any, width: int) -> bool:
    """Whether words of one or two bytes can be read four or two at a time: every address in the table (int64 numpy [chunks,
    COLUMNS]) and every chunk's size must be a multiple of 4."""
    return width < 4 and not (((rows % 4).any(axis=0) & _ADDRESSES).any() or (rows[:, 1] * width % 4).any())


@dataclass(frozen=True, slots=True)
class Addressed:
    """A table in device memory that belongs to someone else. Kernels take it like a tensor; to make a view of one, as of any
    operation of torch, lets go of the interpreter, and some other thread has it then. ``dtype``: of what a row consists of."""

    address: int
    rows: int
    device: torch.device
    dtype: torch.dtype = torch.int64

    def __len__(self) -> int:
        return self.rows

    def data_ptr(self) -> int:
        """The name under which Triton looks for it."""
        return self.address


Table = torch.Tensor | Addressed
"""With a row for each chunk, stream or range."""
