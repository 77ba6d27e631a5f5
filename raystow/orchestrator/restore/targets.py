"""Checks the memory that a restore fills: of targets that share memory, each would get elements of both. Changes no element.

Targets in the same memory that get the same elements, as tied weights do, are filled once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from ...state.shards import overlaps
from ...state.tree import Elements
from ...storage.coding import dtypes
from ...storage.coding.digest import stored_digest
from ...storage.coding.kernels import Words
from ...storage.errors import StateError
from ...storage.format.boxes import Box, overlap
from ...storage.format.manifest import Chunk
from ...storage.versions.reader import PackReader, Request

_MOST_WORK = 1 << 20  # steps to decide whether two targets with gaps between their elements share memory
_REMEDY = "give each memory of its own, as clone() does, or leave one of them out"


@dataclass(frozen=True, eq=False)
class RestoreTarget:
    """Memory that a restore fills. ``where``: names it in errors. ``content``: returns what is equal for equal elements."""

    where: str
    local: Elements
    content: Callable[[], object]


@dataclass(frozen=True, eq=False)
class StoredElements:
    """The elements of a box in a version. Two are equal if their elements are: by what the manifest proves, or by reading both.

    Digests of 64 bits say only that there is something to prove: those of chosen tensors can be equal.
    """

    name: str
    chunks: Sequence[Chunk]
    box: Box
    reader: PackReader

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StoredElements) or self._rows(_digest) != other._rows(_digest):
            return False
        return self._rows(_proof) == other._rows(_proof) or self._read() == other._read()

    def _rows(self, what: Callable[[Chunk], object]) -> object:
        first, rows = self.chunks[0], [row for row in self.chunks if overlap(self.box, row.box) is not None]
        return first.dtype, first.shape, self.box, {row.box: what(row) for row in rows}

    def _read(self) -> bytes:
        """BLAKE3 of the elements."""
        raw = np.empty(self.box[1], f"V{dtypes.dtype(self.chunks[0].dtype).itemsize}")
        self.reader.fill([Request(self.name, self.chunks, self.box, raw)])
        return stored_digest(raw.reshape(-1).view(np.uint8))


def _digest(row: Chunk) -> object:
    return row.raw_digest


def _proof(row: Chunk) -> object:
    return row.proof


def distinct(targets: Sequence[RestoreTarget]) -> list[RestoreTarget]:
    """The targets without empty ones, and without those that are the memory of an earlier one and get the same elements.

    Raises ``StateError`` naming a target that is read-only or whose elements share memory, or two that share memory and do not
    get the same elements.
    """
    regions = dict[Hashable, tuple[RestoreTarget, _Region]]()
    for target in targets:
        if isinstance(target.local, np.ndarray) and not target.local.flags.writeable:
            raise StateError("the array is read-only", subject=target.where)
        if 0 in target.local.shape:
            continue
        if overlaps(target.local):
            raise StateError("elements share memory", subject=target.where, remedy="give it memory of its own: clone() it")
        region = _Region.of(target.local)
        first, _ = regions.setdefault((region, _meaning(target.local)), (target, region))
        if first is not target and first.content() != target.content():
            what = f"is the memory of {first.where}, and the version holds different elements for them"
            raise StateError(what, subject=target.where, remedy=_REMEDY)
    _check_apart(regions.values())
    return [target for target, _ in regions.values()]


class _Region(NamedTuple):
    """Where elements are: on a device ("cpu" for arrays), ``strides`` and ``itemsize`` in bytes."""

    device: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, local: Elements) -> _Region:
        """The region of a tensor or array with elements. Of a dimension with one of them, the stride says nothing."""
        shape, size = tuple(local.shape), int(local.itemsize)
        if isinstance(local, np.ndarray):
            device, address, strides = "cpu", int(local.__array_interface__["data"][0]), local.strides
        else:
            device, address = str(local.device), int(local.data_ptr())
            strides = tuple(size * stride for stride in local.stride())
        used = tuple(stride if n > 1 else 0 for n, stride in zip(shape, strides, strict=True))
        return cls(device, address, shape, used, size)

    @property
    def bounds(self) -> tuple[int, int]:
        """The addresses of its first byte, and of the one after its last."""
        low = high = self.address
        for n, stride in zip(self.shape, self.strides, strict=True):
            if stride < 0:
                low += stride * (n - 1)
            else:
                high += stride * (n - 1)
        return low, high + self.itemsize

    def meets(self, other: _Region) -> bool:
        """Whether a byte is in both, exactly; or whether that takes too long to find out."""
        try:
            return np.shares_memory(self._array(), other._array(), max_work=_MOST_WORK)  # type: ignore[arg-type, unused-ignore]  # any number
        except np.exceptions.TooHardError:
            return True

    def _array(self) -> Words:
        """An array at these addresses, which are never accessed: they may be of a GPU."""
        interface = {
            "version": 3,
            "data": (self.address, True),
            "shape": self.shape,
            "strides": self.strides,
            "typestr": f"|V{self.itemsize}",
        }
        return np.asarray(SimpleNamespace(__array_interface__=interface))


def _meaning(local: Elements) -> Hashable:
    """What the bits of an element mean: equal elements have equal bits in memory only if it is equal."""
    lazy = (False, False) if isinstance(local, np.ndarray) else (local.is_conj(), local.is_neg())
    return str(local.dtype).removeprefix("torch."), lazy


def _check_apart(regions: Iterable[tuple[RestoreTarget, _Region]]) -> None:
    """Raise ``StateError`` for the first two in order of addresses that share a byte."""
    spans = sorted(((region.device, *region.bounds, target, region) for target, region in regions), key=lambda span: span[:3])
    reaching = list[tuple[str, int, int, RestoreTarget, _Region]]()  # those before that end after the beginning of this one
    for span in spans:
        device, low, _, target, region = span
        reaching = [other for other in reaching if other[0] == device and other[2] > low]
        for _, _, _, before, its in reaching:
            if region.meets(its):
                what = f"shares memory with {before.where}, whose elements are others"
                raise StateError(what, subject=target.where, remedy=_REMEDY)
        reaching.append(span)
