"""The device memory, the CUDA streams and the other resources that an encoder keeps from one save to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....storage.coding.chunk import ANS, DEFLATE, ZSTD
from ..nvcomp import Codec
from ..uploads import Uploads
from .arena import Arena
from .encode_plan import Limits
from .pack7 import COUNT as PACK_BUFFERS
from .pack7 import PackBuffers
from .pinned_ring import PinnedRing

SIZE = 1440 << 20
"""Bytes of device memory that an encoder allocates by default."""

_GROUP = {DEFLATE: 64 << 20, ZSTD: 32 << 20, ANS: 64 << 20}  # plane bytes in a group
_BATCH, _PLANE = 128 << 20, 64 << 20  # raw bytes in a batch, and bytes of its planes that are coded
_ALIGN = 512  # bytes


class EncoderStreams:
    """The CUDA streams of an encoder. ``urgent`` replaces ``read`` and ``pack`` while the training waits. ``coding``: priority of
    the streams that code."""

    def __init__(self, device: torch.device, coding: int = 0) -> None:
        self.read, self.pack = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self.urgent = torch.cuda.Stream(device, priority=-5)
        self.code, self.copy, self.hash = (torch.cuda.Stream(device, priority=coding) for _ in range(3))


class EncoderMemory:
    """Device memory for chunks between reading and the copy to the host. Without a codec, the memory for coding is empty.

    ``size`` bytes are allocated. ``capacity``: bytes of the ring that the results are copied to.

    Attributes:
        limits: The batches and groups that fit into it.
        low_planes, high_planes: Planes that are stored raw, and planes that are coded.
        scratch, out: Scratch memory and output of the coder: ``targets`` are the addresses of the streams, ``sizes`` their bytes.
        dense: The concatenated output.
        pack_buffers: Packed lowest planes.
        values, tree: Values of leaves of digests, and of their trees.
    """

    def __init__(self, device: torch.device, codec: Codec | None, size: int, capacity: int) -> None:
        stream = stride = streams = scratch = high = pack_buffers = 0
        batch = min(_BATCH, size // 10, capacity // 8)
        if codec:
            stream, stride = codec.stream, codec.stride
            streams = min(_GROUP[codec.name], size // 16) // stream
            streams += max(64, streams // 8)  # of many small chunks
            scratch = codec.coding_scratch(streams)
            high, pack_buffers = 3 * streams * stream, batch // 32 * 7 + (1 << 20)  # the lowest of four planes, packed
        self.limits = Limits(batch, _PLANE, max(batch, capacity // 4), streams, stream)
        leaves, tree = size // 32, size // 64  # a group has at most half as many raw bytes as the memory
        parts = [high, scratch, streams * stride, leaves, tree, *(PACK_BUFFERS * [pack_buffers])]
        buffers = [torch.empty(part, dtype=torch.uint8, device=device) for part in (*parts, size - sum(parts))]
        self.high_planes, self.scratch, self.out, self.values, self.tree, *packed, rest = buffers
        self.pack_buffers = PackBuffers(packed)
        dense = rest.numel() // 2 // _ALIGN * _ALIGN if stream else 0
        self.dense, self.low_planes = Arena(rest[:dense]), rest[dense:]
        self.targets = self.out.data_ptr() + torch.arange(streams, device=device) * stride
        self.sizes = torch.empty(streams, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class EncoderResources:
    """Everything that an encoder works with. ``codec`` is None if chunks are stored raw."""

    codec: Codec | None
    memory: EncoderMemory
    streams: EncoderStreams
    ring: PinnedRing
    uploads: Uploads
