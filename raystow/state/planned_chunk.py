"""The chunks that a rank stores: their description, and their bytes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ..storage.coding import kernels
from ..storage.coding.kernels import Bytes
from ..storage.format.boxes import Box
from ..storage.format.manifest import path_text
from .chunk_info import ChunkInfo, DerivedChunk
from .lossy import rounded_chunk
from .lossy.tensor_values import words_of
from .shard_range import ShardRange

if TYPE_CHECKING:
    import torch

_path_text = functools.lru_cache(maxsize=1 << 14)(path_text)


@dataclass(frozen=True)
class PlannedChunk(ShardRange):
    """A chunk that this rank stores. ``device``: the CUDA device that codes it; None: the node worker
    does. ``group``: its group of packs."""

    device: int | None
    group: str

    @property
    def box(self) -> Box:
        return self.cut.box

    @property
    def name(self) -> str:
        return self.shard.leaf.name

    @property
    def address(self) -> int | None:
        """``origin``, if the words are stored without rounding."""
        return self.origin if self.shard.rule is None else None

    @property
    def planes(self) -> tuple[int, ...]:
        """The byte planes that are worth coding: the highest, and others if words are rounded."""
        rule = self.shard.rule
        return (self.dtype.width - 1,) if rule is None else rule.planes(self.dtype.name)

    def host_words(self) -> npt.NDArray[np.void]:
        """Its words in host memory."""
        words: npt.NDArray[np.void] = self.bits
        return words

    def gather(self, uploaded: torch.Tensor | None = None) -> torch.Tensor:
        """A contiguous copy of its words as they are stored, made on the current stream of the device. ``uploaded``: a
        copy of its words in host memory, uint8, which is used up."""
        if uploaded is not None:
            return uploaded if self.shard.rule is None else self._round(uploaded.view(words_of(self.dtype.itemsize)))
        words: torch.Tensor = self.bits
        if self.shard.rule is None:
            return words.contiguous()
        import torch

        return self._round(words.clone(memory_format=torch.contiguous_format))

    def _round(self, words: torch.Tensor) -> torch.Tensor:
        """Round a copy of the words; the findings are kept with the shard."""
        rule, (offset, extent) = self.shard.rule, self.box
        assert rule is not None
        rows, first = words.reshape(-1, extent[-1]), self.shard.offset[-1] + offset[-1]
        made, self.shard.findings[self.box] = rounded_chunk.rounded(rule, rows, self.dtype.name, first)
        return made

    @property
    def identity(self) -> object:
        """Equal for chunks with the same description."""
        shard = self.shard
        of = shard.leaf.path, shard.kind, shard.dtype, shard.shape, shard.offset, shard.rule
        return *of, self.cut.box, self.group

    def describe(self) -> ChunkInfo:
        return self._info

    @functools.cached_property
    def _info(self) -> ChunkInfo:
        shard, leaf = self.shard, self.shard.leaf
        offset = tuple([a + b for a, b in zip(shard.offset, self.box[0], strict=True)])
        return ChunkInfo(
            leaf.name, _path_text(leaf.path), shard.kind, shard.dtype, tuple(shard.shape), self.group, offset, tuple(self.box[1])
        )

    def copy(self, out: Bytes) -> None:
        if not out.size:
            return
        source = self.bits
        if isinstance(source, np.ndarray):
            kernels.copy(source, out)
        else:
            import torch

            with torch.cuda.stream(torch.cuda.Stream(source.device)):  # does not wait for work that the training has queued
                torch.from_numpy(out).view(source.dtype).reshape(source.shape).copy_(source)
        if self.shard.rule is not None:
            import torch

            words = torch.from_numpy(out).view(words_of(self.dtype.itemsize))
            words.copy_(self._round(words).view(-1))


@dataclass(frozen=True)
class PlannedDerived:
    """A chunk that is not stored if all its elements can be derived from ``source``, which has the same
    box."""

    piece: PlannedChunk
    source: PlannedChunk

    def derived(self, digest: int) -> DerivedChunk:
        return DerivedChunk(self.piece.describe(), self.source.name, self.source.dtype.name, digest)


class DeviceChunks(NamedTuple):
    """The chunks that a rank stores, and those that it stores only if they cannot be derived."""

    pieces: tuple[PlannedChunk, ...]
    followers: tuple[PlannedDerived, ...]
