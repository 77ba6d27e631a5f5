"""A part of a rank's shard: a box of elements that follow each other in row-major order."""

from __future__ import annotations

from dataclasses import dataclass

from ..storage.coding import dtypes
from .chunks import Cut
from .shards import Shard
from .tree import Elements


@dataclass(frozen=True)
class ShardRange:
    """Elements of ``shard`` in the box of ``cut``."""

    shard: Shard
    cut: Cut

    @property
    def nbytes(self) -> int:
        return self.cut.nbytes

    @property
    def dtype(self) -> dtypes.DType:
        """The type of its words."""
        return self.shard.format

    @property
    def on_host(self) -> bool:
        """Whether its words are in host memory."""
        return self.shard.device is None

    @property
    def origin(self) -> int | None:
        """The device address of its words; None if they are not contiguous, or in host memory."""
        place = None if self.on_host else self.shard.place
        return None if place is None else place + self.cut.start

    @property
    def bits(self) -> Elements:
        """Its words, which share the memory of the shard."""
        return self.shard.bits[tuple(slice(a, a + n) for a, n in zip(*self.cut.box, strict=True)) + (...,)]
