"""What the encoder works on: chunks on their way from a tensor to host memory."""

from __future__ import annotations

import functools
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

    @property
    def held(self) -> int:
        """Bytes of the slots in which something is still to be announced, or to be written."""

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


@dataclass(frozen=True)
class Job:
    """A chunk as an encoder sees it, in every save that it is part of: the ``index``-th of those given. ``stream``: bytes of a
    plane in a coded stream; 0 if the chunk leaves as it is, as one plane. The rest is what its source says of itself."""

    index: int
    name: str
    address: int | None
    nbytes: int
    dtype: DType
    stream: int = 0

    @property
    def coded(self) -> bool:
        """Whether its highest plane is to be coded."""
        return self.stream > 0

    @functools.cached_property
    def width(self) -> int:
        """Its planes."""
        return self.dtype.width if self.coded else 1

    @functools.cached_property
    def plane(self) -> int:
        """Bytes of each of its planes."""
        return self.nbytes // self.width

    @property
    def room(self) -> int:
        """Bytes that a plane takes in memory."""
        return -(-self.plane // 16) * 16

    @property
    def streams(self) -> int:
        """Streams of the highest plane."""
        return -(-self.plane // self.stream) if self.coded else 0

    @property
    def kind(self) -> tuple[int, bool, bool, bool, str]:
        """Chunks of one kind are read together. The last part of the name puts tensors together that are never negative."""
        return self.width, self.coded, self.dtype.rotate, self.address is None, self.name.rpartition(".")[2]


@dataclass
class Passage:
    """A job on its way through one save. ``packed``: its lowest plane was. ``sizes``: of the streams of its highest plane, if it
    became smaller by being coded with ``codec``. ``parts``: where its ``low``, ``middle`` and ``top`` planes lie."""

    job: Job
    source: Source
    digest: int
    packed: bool = False
    codec: str = RAW
    sizes: Any = field(default_factory=lambda: np.empty(0, np.int64))
    parts: dict[str, list[Part]] = field(default_factory=dict)

    def coded(self) -> Coded:
        """The chunk, when all its parts have arrived: planes that are stored raw come first, the others behind them."""
        job = self.job
        codecs, stored = [RAW] * job.width, [job.plane] * job.width
        order = ["low", "middle", "top"]
        if self.packed:
            codecs[0], stored[0] = PACK7, job.plane // 8 * 7
            order = ["middle", "low", "top"]
        if len(self.sizes):
            codecs[-1], stored[-1] = self.codec, int(self.sizes.sum())
        elif self.packed:
            order = ["middle", "top", "low"]
        planes = job.width > 1
        coding = Coding(planes, planes and job.dtype.rotate, tuple(codecs), tuple(stored), stream=max(1, job.stream))
        return Coded(self.source, coding, self.sizes, self.digest, [part for name in order for part in self.parts.get(name, [])])
