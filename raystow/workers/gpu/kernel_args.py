"""Arguments of the GPU kernels: tables in device memory with a row for each chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

COLUMNS = 10
"""Columns of the table of ``word_kernels.split`` and ``join``: address of the words, number of words, addresses of the planes."""

MOST_ROWS = (1 << 16) - 1
"""The most rows of one launch: CUDA's limit for the second dimension of a grid."""

_ADDRESSES = np.arange(COLUMNS) != 1


def can_pack(rows: npt.NDArray[np.int64], width: int) -> bool:
    """Return whether words of one or two bytes can be read four or two at a time.

    Every address in the table (int64 [chunks, COLUMNS]) and the size of every chunk must be a multiple of 4.
    """
    return width < 4 and not (((rows % 4).any(axis=0) & _ADDRESSES).any() or (rows[:, 1] * width % 4).any())


def upload(rows: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Copy a table to the device through pinned memory, on the current stream, without waiting."""
    return torch.from_numpy(rows).pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Addressed:
    """A part of a tensor in device memory, given by its address. Kernels accept it like a tensor.

    It replaces views in loops over many kernels: every torch operation, also the creation of a view, releases the interpreter
    lock, and another thread takes it.
    """

    address: int
    rows: int
    device: torch.device
    dtype: torch.dtype = torch.int64

    def __len__(self) -> int:
        return self.rows

    def data_ptr(self) -> int:
        """Return the address, as a tensor does."""
        return self.address


Table: TypeAlias = torch.Tensor | Addressed
"""A table with a row for each chunk, stream or range."""


def part(table: Table, first: int, rows: int, columns: int = 1) -> Addressed:
    """Return rows of an int64 table from row ``first`` on."""
    return Addressed(table.data_ptr() + 8 * columns * first, rows, table.device)


def in_parts(*tables: tuple[Table, int]) -> Iterator[list[Table]]:
    """Yield int64 tables that have the same rows, given with their numbers of columns, in parts of at most ``MOST_ROWS`` rows."""
    rows = len(tables[0][0])
    if rows <= MOST_ROWS:
        yield [table for table, _ in tables]
        return
    for first in range(0, rows, MOST_ROWS):
        yield [part(table, first, min(MOST_ROWS, rows - first), columns) for table, columns in tables]
