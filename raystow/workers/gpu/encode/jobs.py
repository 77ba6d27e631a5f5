"""What an encoder works on, and where what it makes goes to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ....storage.coding.dtypes import DType
from ...protocol.messages import ChunkInfo
from .pinned_ring import RingRun


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

    @property
    def planes(self) -> tuple[int, ...]:
        """Numbers of the planes that are worth coding, ascending; the highest is the last."""

    @property
    def followed(self) -> str:
        """The dtype of chunks that may be this one's words rounded; nothing if there are none."""

    @property
    def identity(self) -> Any:
        """Equal for chunks of which the same is said: see ``describe``."""

    def describe(self) -> ChunkInfo:
        """Return the fields of its manifest row that are known before it is coded."""

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

    def write(self, source: torch.Tensor, relieve: Callable[[], None]) -> RingRun:
        """See ``outbox.Outbox.write``."""


@dataclass(frozen=True)
class Job:
    """A chunk as an encoder sees it, in every save that it is part of: the ``index``-th of those given. ``stream``: bytes of a
    plane in a coded stream; 0 if the chunk leaves as it is, as one plane. ``high``: numbers of its planes that are to be coded.
    ``followed``: the dtype that its words are rounded to as well, to see what follows from them. The rest is what its source says
    of itself."""

    index: int
    name: str
    address: int | None
    nbytes: int
    dtype: DType
    stream: int = 0
    high: tuple[int, ...] = ()
    followed: str = ""

    @property
    def coded(self) -> bool:
        """Whether planes of it are to be coded: the highest, or more."""
        return self.stream > 0

    @functools.cached_property
    def low(self) -> tuple[int, ...]:
        """Numbers of the planes that leave as they are."""
        return tuple(p for p in range(self.width) if p not in self.high)

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
        """Streams of each plane that is to be coded."""
        return -(-self.plane // self.stream) if self.coded else 0

    @property
    def kind(self) -> tuple[bool, int, bool, bool, tuple[int, ...], str, str]:
        """Chunks of one kind are read together, in the order of this. First those that need no coding, and at last those of which
        most does: it lags behind the reading, until that is through. The last part of the name puts tensors together that are
        never negative."""
        scattered, last = self.address is None, self.name.rpartition(".")[2]
        return self.coded, -self.width, self.dtype.rotate, scattered, self.high, self.followed, last
