"""Reads tensors in slabs: lists of boxes whose bytes fit into a bounded buffer together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...state.chunks import cuts_of_extent
from ...storage.coding import dtypes
from ...storage.coding.kernels import Bytes
from ...storage.format.boxes import Box, bounds
from ...storage.format.manifest import Chunk
from ...storage.format.selection import Sought
from ...storage.runtime.batches import batches
from ...storage.versions import stored_manifest
from ...storage.versions.contents import TensorSum
from ...storage.versions.reader import PackReader, Request
from ...storage.versions.version import Version


@dataclass(frozen=True)
class TensorBox:
    """A box of a tensor. ``rows``: for each version that it is read from, at least those of the manifest that overlap it."""

    name: str
    dtype: str
    box: Box
    rows: tuple[Sequence[Chunk], ...] = ()

    @property
    def nbytes(self) -> int:
        """Its raw bytes."""
        return math.prod(self.box[1]) * dtypes.dtype(self.dtype).itemsize


def boxes_of(versions: Sequence[Version], names: Iterable[str], limit: float) -> Iterator[TensorBox]:
    """Cut whole tensors, which are alike in all versions, into boxes of at most ``limit`` bytes, in row-major order. Their rows
    are read for many boxes at a time: for as many as a manifest keeps."""
    all_tensors = [version.contents.tensors for version in versions]
    boxes = (box for name in names for box in _boxes(name, all_tensors[0][name], limit))

    def count(box: TensorBox) -> int:
        return max(_rows(box, tensors[box.name]) for tensors in all_tensors)

    for several in batches(boxes, count, stored_manifest.KEPT):
        sought = {
            name: Sought(tensor=True, shape=all_tensors[0][name].shape, box=bounds([one.box for one in same]))
            for name, same in itertools.groupby(several, lambda box: box.name)
        }
        found = [version.rows(sought) for version in versions]
        yield from (replace(box, rows=tuple(rows[box.name] for rows in found)) for box in several)


def slabs(boxes: Iterable[TensorBox], limit: int) -> Iterator[list[TensorBox]]:
    """Yield the boxes in lists of at most ``limit`` bytes, with no more rows than a manifest keeps, or of a single box."""

    def part(box: TensorBox) -> int:
        return max(box.nbytes, limit * max(map(len, box.rows)) // stored_manifest.KEPT)

    return batches(boxes, part, limit)


def _boxes(name: str, of: TensorSum, limit: float) -> Iterator[TensorBox]:
    if 0 in of.shape or math.prod(of.shape) * dtypes.dtype(of.dtype).itemsize <= limit:
        yield TensorBox(name, of.dtype, ((0,) * len(of.shape), of.shape))
        return
    for cut in cuts_of_extent(of.shape, dtypes.dtype(of.dtype).itemsize, int(limit)):
        yield TensorBox(name, of.dtype, cut.box)


def _rows(box: TensorBox, of: TensorSum) -> int:
    """About how many rows of a tensor overlap a box."""
    return math.ceil(of.chunks * math.prod(box.box[1]) / max(1, math.prod(of.shape)))


def read_slab(
    reader: PackReader,
    slab: Iterable[TensorBox],
    buffer: Bytes,
    progress: Callable[[int], None] = lambda done: None,
    *,
    place: int = 0,
) -> int:
    """Read the boxes of a slab one after another into ``buffer`` (uint8 [n]), and return their bytes. ``place``: that of the
    reader's version among those of the boxes."""
    requests, end = [], 0
    for part in slab:
        item = f"V{dtypes.dtype(part.dtype).itemsize}"
        target = buffer[end : end + part.nbytes].view(item).reshape(part.box[1])
        requests.append(Request(part.name, part.rows[place], part.box, target))
        end += part.nbytes
    reader.fill(requests, progress)
    return end
