"""What the encoder works on: chunks on their way from a tensor to host memory, and the groups in which they pass its stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from ...storage.chunk import PACK7, RAW, Coding
from ...storage.dtypes import DType
from .outbox import Part


class Source(Protocol):
    """A chunk of a tensor in device memory."""

    @property
    def name(self) -> str:
        """The tensor's name."""

    @property
    def dtype(self) -> DType:
        """What its words are."""

    @property
    def nbytes(self) -> int:
        """Bytes; whole words."""

    @property
    def address(self) -> int | None:
        """Where the words are, if they lie one behind the other."""

    def gather(self) -> torch.Tensor:
        """A contiguous copy, made on the current stream."""


class Sink(Protocol):
    """Pinned host memory in slots."""

    @property
    def capacity(self) -> int:
        """Bytes of all slots."""

    def write(self, source: torch.Tensor, pieces: list[tuple[int, int]], relieve: Callable[[], None]) -> list[list[Part]]:
        """See ``outbox.Outbox.write``."""


@dataclass
class Coded:
    """A chunk that has arrived in host memory: ``parts`` in the order in which its bytes lie in a pack. ``sizes``: of its
    streams, int64; they are not in ``coding``."""

    source: Any
    coding: Coding
    sizes: Any
    digest: int
    parts: list[Part]


@dataclass
class Job:
    """A chunk on its way; what its source says of itself is asked for once. ``plane``: bytes of each of its planes. ``low``,
    ``middle``, ``top``: where its lowest plane, those between and its highest one lie in their arenas; -1 for none. ``packed``:
    the lowest plane was. ``sizes``: of the streams of the highest plane, if it became smaller by being coded with ``codec`` in
    streams of ``stream`` bytes."""

    source: Source
    index: int
    address: int | None
    nbytes: int
    dtype: DType
    plane: int
    width: int
    codec: str = RAW
    stream: int = 1
    low: int = -1
    middle: int = -1
    top: int = -1
    packed: bool = False
    digest: int = 0
    sizes: Any = field(default_factory=lambda: np.empty(0, np.int64))
    parts: dict[str, list[Part]] = field(default_factory=dict)

    @property
    def room(self) -> int:
        """Bytes that a plane takes in an arena."""
        return -(-self.plane // 16) * 16

    @property
    def streams(self) -> int:
        """Streams of the highest plane."""
        return -(-self.plane // self.stream)

    def coded(self) -> Coded:
        """The chunk, when all its parts have arrived: planes that are stored raw come first, the others behind them."""
        codecs, stored = [RAW] * self.width, [self.plane] * self.width
        order = ["low", "middle", "top"]
        if self.packed:
            codecs[0], stored[0] = PACK7, self.plane // 8 * 7
            order = ["middle", "low", "top"]
        if len(self.sizes):
            codecs[-1], stored[-1] = self.codec, int(self.sizes.sum())
        elif self.packed:
            order = ["middle", "top", "low"]
        planes = self.width > 1
        coding = Coding(planes, planes and self.dtype.rotate, tuple(codecs), tuple(stored), stream=self.stream)
        return Coded(self.source, coding, self.sizes, self.digest, [part for name in order for part in self.parts.get(name, [])])


@dataclass
class Batch:
    """Chunks that are read by one launch. ``low`` and ``middle``: bytes of those regions, which begin at ``base``."""

    jobs: list[Job]
    base: int
    low: int
    middle: int
    read: Any = None
    results: Any = None
    copies: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Group:
    """Chunks whose highest planes are coded by one call, in so many ``regions`` of the arena."""

    jobs: list[Job]
    regions: int
    done: Any = None
    results: Any = None
