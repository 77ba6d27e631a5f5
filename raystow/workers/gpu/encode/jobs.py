"""A chunk as the encoder plans it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ....storage.coding.chunk import SMALL
from ....storage.coding.dtypes import DType
from ..encode_request import Source


@dataclass(frozen=True)
class Job:
    """A chunk to encode. It depends on the place and the type of the chunk, not on its content, and is reused in later saves.

    Args:
        index: The position of its source in the request.
        stream: Bytes of a plane in each coded stream; 0 if the chunk is stored raw, as a single plane.
        high: Numbers of its planes that are coded.
    """

    index: int
    name: str
    address: int | None
    nbytes: int
    dtype: DType
    on_host: bool = False
    stream: int = 0
    high: tuple[int, ...] = ()

    @staticmethod
    def of(index: int, source: Source, stream: int) -> Job:
        """Return the job for a source; ``stream``: bytes of a plane in each coded stream, 0 if nothing is coded."""
        place = source.name, source.address, source.nbytes, source.dtype, source.on_host
        if not stream or source.nbytes < SMALL:
            return Job(index, *place)
        return Job(index, *place, stream, source.planes)

    @property
    def coded(self) -> bool:
        """Whether any of its planes are coded."""
        return self.stream > 0

    @functools.cached_property
    def low(self) -> tuple[int, ...]:
        """Numbers of the planes that are stored raw."""
        return tuple(p for p in range(self.width) if p not in self.high)

    @functools.cached_property
    def width(self) -> int:
        """The number of its planes."""
        return self.dtype.width if self.coded else 1

    @functools.cached_property
    def plane(self) -> int:
        """Bytes of each plane."""
        return self.nbytes // self.width

    @property
    def padded(self) -> int:
        """Bytes that a plane occupies in device memory."""
        return -(-self.plane // 16) * 16

    @property
    def streams(self) -> int:
        """Coded streams of each plane that is coded."""
        return -(-self.plane // self.stream) if self.coded else 0

    @property
    def kind(self) -> tuple[bool, int, bool, bool, bool, tuple[int, ...], str]:
        """The sort key of jobs: those of one kind can be read by one launch.

        Jobs without coding come first, and those with most coding last, since coding goes on while later chunks are read. The
        last part of the name brings tensors together that are never negative, unless it is a number in a list.
        """
        scattered, last = self.address is None, self.name.rpartition(".")[2]
        role = "" if last.isdecimal() else last
        return self.coded, -self.width, self.dtype.rotate, scattered, self.on_host, self.high, role
