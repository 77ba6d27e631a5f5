"""Tensors as the GPU encoders get them: each is one chunk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raystow.storage.coding import dtypes
from raystow.workers.protocol.messages import ChunkInfo, DerivedChunk


@dataclass(frozen=True, eq=False)
class Source:
    """A tensor that is one chunk."""

    name: str
    tensor: torch.Tensor
    coded: tuple[int, ...] = ()  # planes; none: the highest
    on_host = False

    @property
    def dtype(self) -> dtypes.DType:
        return dtypes.dtype(str(self.tensor.dtype).removeprefix("torch."))

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    @property
    def address(self) -> int | None:
        return self.tensor.data_ptr() if self.tensor.is_contiguous() else None

    origin = address

    @property
    def planes(self) -> tuple[int, ...]:
        return self.coded or (self.dtype.width - 1,)

    @property
    def identity(self) -> Any:
        return self.name

    def describe(self) -> ChunkInfo:
        shape = tuple(self.tensor.shape)
        path, offset = f'["{self.name}"]', (0,) * len(shape)
        return ChunkInfo(self.name, path, "tensor", self.dtype.name, shape, "weights", offset, shape)

    def gather(self) -> torch.Tensor:
        return self.tensor.contiguous().view(torch.uint8)

    @property
    def bytes(self) -> bytes:
        return self.tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


@dataclass(frozen=True, eq=False)
class HostSource(Source):
    """A tensor in host memory that is one chunk. ``reads``: its name, each time it was read."""

    reads: list[str] = field(default_factory=list)
    on_host = True
    address = origin = None

    def host_words(self) -> npt.NDArray[np.void]:
        self.reads.append(self.name)
        words: npt.NDArray[np.void] = self.tensor.view(torch.uint8).numpy().view(f"V{self.tensor.element_size()}")
        return words

    def gather(self, uploaded: torch.Tensor | None = None) -> torch.Tensor:
        assert uploaded is not None
        return uploaded


@dataclass(frozen=True, eq=False)
class Follower:
    piece: Source
    source: Source

    def derived(self, digest: int) -> DerivedChunk:
        return DerivedChunk(self.piece.describe(), self.source.name, self.source.dtype.name, digest)
