"""What is known of a chunk before it is coded, and of a range that ranks compare; the largest chunks. Needs no torch."""

from __future__ import annotations

import msgspec

from ..storage.limits import Digest, Shape, Text

HOST_CHUNK = 4 << 20
"""Bytes of the largest chunk of a tensor in host memory, and of a slot of the ring that it is staged in."""

DEVICE_CHUNK = 16 << 20
"""Bytes of the largest chunk of a tensor on a GPU."""


class ChunkInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The fields of a chunk's manifest row that are known before the chunk is coded."""

    name: Text
    path: Text
    kind: Text
    dtype: Text
    shape: Shape
    group: Text
    offset: Shape
    extent: Shape


class DerivedChunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A chunk that is not stored, since it follows from another one: see ``storage.coding.derived``."""

    info: ChunkInfo
    source: Text
    source_dtype: Text
    digest: Digest


class RangeInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """What a range is. ``offset``, ``extent``: its box in the tensor. ``writer``: the rank that stores it; -1 if each rank stores
    its own. ``buffer``: whether the tensor is a buffer of a module, which may differ by design. ``dtype``: empty for a plain
    value."""

    name: Text
    dtype: Text = ""
    offset: Shape = ()
    extent: Shape = ()
    writer: int = -1
    buffer: bool = False
