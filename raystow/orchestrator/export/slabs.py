"""Reads tensors in slabs: lists of boxes whose bytes fit into a bounded buffer together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ...state.chunks import cuts_of_extent
from ...storage.coding import dtypes
from ...storage.coding.kernels import Bytes
from ...storage.format.boxes import Box
from ...storage.versions.reader import PackReader, Request
from ...storage.versions.version import TensorInfo, Version


@dataclass(frozen=True)
class TensorBox:
    """A box of a tensor. ``is_chunk``: it is exactly one chunk of the versions that it is read from."""

    name: str
    dtype: str
    box: Box
    is_chunk: bool = False

    @property
    def nbytes(self) -> int:
        """Its raw bytes."""
        return math.prod(self.box[1]) * dtypes.dtype(self.dtype).itemsize


def boxes_of(name: str, info: TensorInfo, limit: int) -> Iterator[TensorBox]:
    """Cut a whole tensor into boxes of at most ``limit`` bytes, in row-major order."""
    if 0 in info.shape:
        yield TensorBox(name, info.dtype, ((0,) * len(info.shape), info.shape))
        return
    for cut in cuts_of_extent(info.shape, dtypes.dtype(info.dtype).itemsize, limit):
        yield TensorBox(name, info.dtype, cut.box)


def read_slab(
    version: Version,
    reader: PackReader,
    slab: Iterable[TensorBox],
    buffer: Bytes,
    progress: Callable[[int], None] = lambda done: None,
) -> int:
    """Read the boxes of a slab one after another into ``buffer`` (uint8 [n]), and return their bytes."""
    requests, end = [], 0
    for part in slab:
        item = f"V{dtypes.dtype(part.dtype).itemsize}"
        target = buffer[end : end + part.nbytes].view(item).reshape(part.box[1])
        rows = version.chunks[part.name]
        if part.is_chunk:
            rows = [row for row in rows if row.offset == part.box[0]]
        requests.append(Request(part.name, rows, part.box, target))
        end += part.nbytes
    reader.fill(requests, progress)
    return end
