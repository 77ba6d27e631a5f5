"""The bytes of an entry: the stored bytes of its tensors, the header, and the size and the digest of the header.

The header has the digest of the stored bytes of each part of a tensor, which is checked before the part is decoded. It is at the
end, because the bytes are handed over while others are still coded.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from ...storage.coding.digest import stored_digest
from ...storage.coding.kernels import Bytes
from ...storage.errors import Damaged, ProtocolError
from ...workers.protocol.messages import EntryHeader, EntryInfo, RecordedTensor, decode, encode

_TAIL = struct.Struct("<Q32s")
_MOST_HEADER = 256 << 20

OVERHEAD = _MOST_HEADER + _TAIL.size
"""The most bytes of an entry without those of its tensors."""


@dataclass(frozen=True)
class JournalEntry:
    """An entry whose header was checked. ``digest``: of the header. ``data``: the stored bytes of all tensors, uint8."""

    info: EntryInfo
    header: EntryHeader
    digest: bytes
    data: Bytes


def tensors_of(header: EntryHeader) -> list[RecordedTensor]:
    """All tensors of an entry: the gradients, and then the buffers."""
    gradients = [gradient for step in header.steps for gradient in step.gradients]
    return [*gradients, *(buffer for _, buffer in header.buffers)]


def end_of(header: EntryHeader) -> tuple[Bytes, bytes]:
    """Return the bytes of an entry after those of its tensors, and the digest of its header."""
    body = encode(header, most=_MOST_HEADER)
    digest = stored_digest(body)
    return np.frombuffer(body + _TAIL.pack(len(body), digest), np.uint8), digest


def parse(info: EntryInfo, content: memoryview) -> JournalEntry:
    """Return the entry in these bytes. Raises ``Damaged`` unless they end with the header of the entry that ``info`` describes,
    and have all bytes that it mentions."""
    subject = f"journal entry of step {info.step}, rank {info.rank}"
    if content.nbytes != info.size or content.nbytes < _TAIL.size:
        raise Damaged(f"{content.nbytes} bytes where {info.size} were expected", subject=subject)
    end = content.nbytes - _TAIL.size
    length, digest = _TAIL.unpack(content[end:])
    if length > min(_MOST_HEADER, end):
        raise Damaged("the header is longer than the entry", subject=subject)
    body, data = bytes(content[end - length : end]), np.frombuffer(content[: end - length], np.uint8)
    if stored_digest(body) != digest:
        raise Damaged("the header does not have its digest", subject=subject)
    try:
        header = decode(body, EntryHeader)
    except ProtocolError as error:
        raise Damaged(f"not a header of this version of raystow: {error}", subject=subject) from error
    if replace(info, size=0, digest=b"") != header.info:
        raise Damaged("the bytes are another entry", subject=subject)
    spans = [(part.start, sum(part.stored)) for tensor in tensors_of(header) for part in tensor.parts]
    if sum(size for _, size in spans) != data.size or any(not 0 <= start <= data.size - size for start, size in spans):
        raise Damaged("the tensors do not add up to the entry", subject=subject)
    return JournalEntry(info, header, digest, data)
