"""The device memory that an encoder takes, once, and what each part of it is for."""

from __future__ import annotations

from typing import Any

import torch

from ....storage.coding.chunk import ANS, DEFLATE, ZSTD
from .arena import Arena
from .encode_plan import Limits
from .pack7 import COUNT as PACK_BUFFERS
from .pack7 import PackBuffers

SIZE = 1440 << 20
"""Bytes that an encoder takes by default."""

_GROUP = {DEFLATE: 64 << 20, ZSTD: 32 << 20, ANS: 64 << 20}  # plane bytes that are coded by one call
_BATCH, _PLANE = 128 << 20, 64 << 20  # raw bytes that are read by one launch, and bytes of each of their planes
_ALIGN = 512  # bytes


class EncoderMemory:
    """``size`` bytes of a device, for what is coded with ``codec`` on its way to ``capacity`` bytes of host memory.

    ``kept``: planes that leave as they are. ``tops``: those that are to be coded; ``scratch``: of the coder; ``out``: what it
    makes, a place for each stream; ``dense``: the same, put together. ``pack_buffers``: for lowest planes that are packed.
    Without a codec all but ``kept`` is empty.
    """

    def __init__(self, device: torch.device, codec: Any, size: int, capacity: int) -> None:
        stream = stride = streams = scratch = tops = pack_buffers = 0
        batch = min(_BATCH, size // 10, capacity // 8)
        if codec:
            stream, stride = codec.stream, codec.stride
            streams = min(_GROUP[codec.name], size // 16) // stream
            streams += max(64, streams // 8)  # of many small chunks
            scratch = codec.coding_scratch(streams)
            tops, pack_buffers = 3 * streams * stream, batch // 32 * 7 + (1 << 20)  # the lowest of four planes, packed
        self.limits = Limits(batch, _PLANE, max(batch, capacity // 4), streams, stream)
        parts = [tops, scratch, streams * stride, *(PACK_BUFFERS * [pack_buffers])]
        made = [torch.empty(part, dtype=torch.uint8, device=device) for part in (*parts, size - sum(parts))]
        self.tops, self.scratch, self.out, *rooms, rest = made
        self.pack_buffers = PackBuffers(rooms)
        dense = rest.numel() // 2 // _ALIGN * _ALIGN if stream else 0
        self.dense, self.kept = Arena(rest[:dense]), rest[dense:]
