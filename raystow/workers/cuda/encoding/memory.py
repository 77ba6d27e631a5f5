"""The device memory that an encoder takes, once, and what each part of it is for."""

from __future__ import annotations

from typing import Any

import torch

from ....storage.coding.chunk import ANS, DEFLATE, ZSTD
from ..bases.lanes import LANES, Lanes
from .arena import Arena
from .program import Limits
from .sevens import COUNT as SEVENS
from .sevens import Sevens

SIZE = 1440 << 20
"""Bytes that an encoder takes by default."""

_GROUP = {DEFLATE: 64 << 20, ZSTD: 32 << 20, ANS: 64 << 20}  # plane bytes that are coded by one call
_BATCH, _PLANE = 128 << 20, 64 << 20  # raw bytes that are read by one launch, and bytes of each of their planes
_ALIGN = 512  # bytes


class Memory:
    """``size`` bytes of a device, for what is coded with ``codec`` on its way to ``capacity`` bytes of host memory.

    ``kept``: planes that leave as they are. ``tops``: those that are to be coded; ``scratch``: of the coder; ``out``: what it
    makes, a place for each stream; ``dense``: the same, put together. ``sevens``: for lowest planes that are packed. ``lanes``:
    for what chunks are differences to; they have nothing until ``make_lanes``. Without a codec all but ``kept`` is empty.
    """

    def __init__(self, device: torch.device, codec: Any, size: int, capacity: int) -> None:
        stream = stride = streams = scratch = tops = sevens = lane = 0
        batch = min(_BATCH, size // 10, capacity // 8)
        if codec:
            stream, stride = codec.stream, codec.stride
            streams = min(_GROUP[codec.name], size // 16) // stream
            streams += max(64, streams // 8)  # of many small chunks
            scratch = codec.coding_scratch(streams)
            tops, sevens = 3 * streams * stream, batch // 32 * 7 + (1 << 20)  # the lowest of four planes, packed
            lane = size // 15 // _ALIGN * _ALIGN
        self.limits = Limits(batch, _PLANE, max(batch, capacity // 4), streams, stream, lane)
        parts = [tops, scratch, streams * stride, *(SEVENS * [sevens])]
        made = [torch.empty(part, dtype=torch.uint8, device=device) for part in (*parts, size - sum(parts))]
        self.tops, self.scratch, self.out, *rooms, self._rest = made
        self.sevens, self.lanes = Sevens(rooms), Lanes(device, lane)
        self._divide(0)

    def make_lanes(self) -> None:
        """Set a part aside for lanes, a fifth of the whole. ``kept`` and ``dense`` are smaller from now on, and lie elsewhere."""
        self.lanes.settle(self._divide(LANES * self.lanes.size))

    def _divide(self, lanes: int) -> torch.Tensor:
        """Share out what nothing else is for; the part that is for lanes."""
        rest = self._rest.numel() - lanes
        dense = rest // 2 // _ALIGN * _ALIGN if self.limits.stream else 0
        self.dense, self.kept = Arena(self._rest[lanes : lanes + dense]), self._rest[lanes + dense :]
        return self._rest[:lanes]
