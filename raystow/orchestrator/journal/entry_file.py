"""The bytes of an entry: the size and the digest of its header, the header, and the stored bytes of its tensors.

The header has the digest of the stored bytes of each part of a tensor, which is checked before the part is decoded.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from ...storage.coding.digest import stored_digest
from ...storage.coding.kernels import Bytes
from ...storage.errors import Damaged, ProtocolError
from ...storage.object_store import Buffer
from ...workers.protocol.messages import EntryHeader, EntryInfo, RecordedTensor, decode, encode
from .gradient_coding import decode as decode_tensor
from .gradient_coding import stored_sizes

_HEAD = struct.Struct("<Q32s")
_MOST_HEADER = 256 << 20


@dataclass(frozen=True)
class JournalEntry:
    """An entry whose header was checked. ``digest``: of the header. ``data``: the stored bytes of all tensors, uint8."""

    info: EntryInfo
    header: EntryHeader
    digest: bytes
    data: Bytes

    def tensors(self) -> Iterator[StoredTensor]:
        """Yield all tensors in the order of ``tensors_of``."""
        at = 0
        for tensor in tensors_of(self.header):
            yield StoredTensor(tensor, self.data, at)
            at += sum(stored_sizes([tensor]))


class StoredTensor(NamedTuple):
    """A tensor of an entry, whose parts begin at byte ``start`` of the entry's ``data``."""

    recorded: RecordedTensor
    data: Bytes
    start: int

    def decode(self) -> torch.Tensor | None:
        """The tensor in host memory; None if none was recorded. ``Damaged`` if its bytes do not have their digests, or do
        not fit its description."""
        ends = itertools.accumulate(stored_sizes([self.recorded]), initial=self.start)
        return decode_tensor(self.recorded, (self.data[first:last] for first, last in itertools.pairwise(ends)))


def tensors_of(header: EntryHeader) -> list[RecordedTensor]:
    """All tensors of an entry in the order of their bytes."""
    gradients = [gradient for step in header.steps for gradient in step.gradients]
    return [*gradients, *(buffer for _, buffer in header.buffers)]


def pack(header: EntryHeader, stored: Sequence[Bytes]) -> tuple[EntryInfo, bytes, list[Buffer]]:
    """Return what is known of an entry, the digest of its header, and its bytes in parts.

    Args:
        stored: The bytes of its tensors.
    """
    body = encode(header, most=_MOST_HEADER)
    digest = stored_digest(body)
    parts: list[Buffer] = [_HEAD.pack(len(body), digest) + body, *(part.data for part in stored)]
    size = sum(memoryview(part).nbytes for part in parts)
    return replace(header.info, size=size), digest, parts


def parse(info: EntryInfo, content: memoryview) -> JournalEntry:
    """Return the entry in these bytes. Raises ``Damaged`` unless they are the header of the entry that ``info`` describes, and as
    many bytes as it promises."""
    subject = f"journal entry of step {info.step}, rank {info.rank}"
    if content.nbytes != info.size or content.nbytes < _HEAD.size:
        raise Damaged(f"{content.nbytes} bytes where {info.size} were expected", subject=subject)
    length, digest = _HEAD.unpack(content[: _HEAD.size])
    if length > min(_MOST_HEADER, content.nbytes - _HEAD.size):
        raise Damaged("the header is longer than the entry", subject=subject)
    body = bytes(content[_HEAD.size : _HEAD.size + length])
    data = np.frombuffer(content[_HEAD.size + length :], np.uint8)
    if stored_digest(body) != digest:
        raise Damaged("the header does not have its digest", subject=subject)
    try:
        header = decode(body, EntryHeader)
    except ProtocolError as error:
        raise Damaged(f"not a header of this version of raystow: {error}", subject=subject) from error
    if replace(info, size=0) != header.info:
        raise Damaged("the bytes are another entry", subject=subject)
    if sum(stored_sizes(tensors_of(header))) != data.size:
        raise Damaged("the tensors do not add up to the entry", subject=subject)
    return JournalEntry(info, header, digest, data)
