"""A state as a header, flat bytes and the digests of their chunks, and back.

The digests come last, so that chunks are sent while later ones are still copied. The header and the list of digests each have a
digest of their own. Everything is checked before anything is made of it.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

from ....storage.coding import dtypes
from ....storage.coding.digest import stored_digest
from ....storage.coding.kernels import Bytes
from ....storage.errors import Damaged, ProtocolError
from ....storage.format import manifest, values
from ....workers.cache.host_memory import memory_limit
from ....workers.protocol.messages import StagedLeaf, StagedMesh, StateHeader, decode, encode
from ...save.shards import shard_of
from ...save.state_tree import Leaf, Path, State, check_values, flatten
from ..dcp.keys import assemble as nested
from .dtensor_parts import assemble, layout_part, mesh_part, meshes_of
from .flat_bytes import ALIGN, CHUNK, FlatBytes, FlatPiece, content

Read = Callable[[int, memoryview], None]
"""Fills memory with the bytes of a staged state from a position."""

_HEAD = struct.Struct("<Q32s")  # the first bytes of a staged state: the size of the header that follows, and its digest

_TABLE_DIGEST = 32
_MOST_HEADER = 256 << 20
_DIGEST = 16
_PAGE = 4096
_SUBJECT = "the staged state"


@dataclass(frozen=True)
class OwnTensor:
    """A tensor of this process. ``value``: as in the state."""

    leaf: StagedLeaf
    content: Bytes | torch.Tensor
    value: object


def describe(state: State, step: int) -> tuple[StateHeader, FlatBytes]:
    """Return the header, and the bytes of the tensors.

    Raises:
        StateError: The state contains something else than tensors, arrays, plain values, dicts, lists and tuples.
    """
    leaves, contents, meshes = list[StagedLeaf](), list[Bytes | torch.Tensor](), dict[StagedMesh, int]()
    found = flatten(state)
    check_values(found)
    for leaf in found:
        if leaf.is_tensor:
            own = _own(leaf, meshes)
            leaves.append(own.leaf)
            contents.append(own.content)
        else:
            leaves.append(StagedLeaf(manifest.path_text(leaf.path), manifest.VALUE, values.dumps(leaf.value)))
    places, size = _places(leaves)
    flat = FlatBytes([FlatPiece(*place, part) for place, part in zip(places, contents, strict=True) if place[1]])
    return StateHeader(step, size, tuple(leaves), tuple(meshes)), flat


def chunks_of(header: StateHeader) -> int:
    """Return the number of chunks of a state."""
    return -(-header.size // CHUNK)


def head(header: StateHeader) -> bytes:
    """Return what comes before the bytes of the tensors."""
    body = encode(header, most=_MOST_HEADER)
    whole = _HEAD.pack(len(body), stored_digest(body)) + body
    return whole + bytes(-len(whole) % _PAGE)


def read_header(read: Read, step: int) -> tuple[StateHeader, int]:
    """Return the header of a state that fits this machine, and where the bytes of the tensors begin."""
    first = bytearray(_HEAD.size)
    read(0, memoryview(first))
    size, digest = _HEAD.unpack(first)
    if size > _MOST_HEADER:
        raise Damaged(f"a header of {size} bytes", subject=_SUBJECT)
    body = bytearray(size)
    read(_HEAD.size, memoryview(body))
    if stored_digest(body) != digest:
        raise Damaged("the header does not have its digest", subject=_SUBJECT)
    return _parsed(bytes(body), step), -(-(_HEAD.size + size) // _PAGE) * _PAGE


def _parsed(body: bytes, step: int) -> StateHeader:
    try:
        header = decode(body, StateHeader)
    except ProtocolError as error:
        raise Damaged(f"the header is invalid: {error}", subject=_SUBJECT) from error
    _, size = _places(header.leaves)
    if header.step != step or header.size != size:
        raise Damaged("the header does not fit the state", subject=_SUBJECT)
    if size > memory_limit():
        raise Damaged(f"{size} bytes are more than this machine's memory", subject=_SUBJECT)
    return header


def chunk_digest(content: Bytes) -> bytes:
    """Return the digest of a chunk: XXH3 of 128 bits, which takes a fifth of the time of BLAKE3. No protection from an attacker,
    whom TLS keeps off."""
    digest: bytes = xxhash.xxh3_128_digest(content.data)
    return digest


def tail(digests: Sequence[bytes]) -> bytes:
    """Return what comes after the bytes of the tensors."""
    table = b"".join(digests)
    return table + stored_digest(table)


def whole_size(header: StateHeader) -> int:
    """Return the size of all of it."""
    return len(head(header)) + header.size + _DIGEST * chunks_of(header) + _TABLE_DIGEST


def read_digests(read: Read, header: StateHeader, start: int) -> list[bytes]:
    """Return the digest of each chunk. ``start``: where the bytes of the tensors begin."""
    whole = bytearray(_DIGEST * chunks_of(header) + _TABLE_DIGEST)
    read(start + header.size, memoryview(whole))
    table = bytes(whole[:-_TABLE_DIGEST])
    if stored_digest(table) != whole[-_TABLE_DIGEST:]:
        raise Damaged("the digests do not have their digest", subject=_SUBJECT)
    return [table[at : at + _DIGEST] for at in range(0, len(table), _DIGEST)]


def check_chunks(found: Sequence[bytes], digests: Sequence[bytes]) -> None:
    """Raise ``Damaged`` if a chunk does not have its digest."""
    for chunk, (one, digest) in enumerate(zip(found, digests, strict=True)):
        if one != digest:
            raise Damaged(f"chunk {chunk} does not have its digest", subject=_SUBJECT)


def memory(size: int) -> Bytes:
    """Return new memory, in huge pages where the system has them: to find pages takes longer than to fill them. Private memory
    gets them more often than shared memory."""
    mapped = mmap.mmap(-1, max(1, size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, np.uint8)[:size]


class OwnState:
    """The tensors of this process, by path. In a state that torchft's Manager sends, the path follows ``user`` and a key."""

    def __init__(self, state: State) -> None:
        self._tensors: dict[Path, OwnTensor] = {}
        found = flatten(state)
        check_values(found)
        for leaf in found:
            if leaf.is_tensor:
                self._tensors[leaf.path] = _own(leaf, {})

    def values(self) -> Iterator[object]:
        """Yield the tensors."""
        return (own.value for own in self._tensors.values())

    def flat(self, header: StateHeader) -> FlatBytes:
        """Return the bytes that a state with this header would have if its tensors were those of this process."""
        places, _ = _places(header.leaves)
        tensors = [leaf for leaf in header.leaves if leaf.kind != manifest.VALUE]
        pieces = [FlatPiece(*place, self._find(leaf)) for place, leaf in zip(places, tensors, strict=True) if place[1]]
        return FlatBytes(pieces)

    def _find(self, leaf: StagedLeaf) -> Bytes | torch.Tensor | None:
        path = manifest.parse_path(leaf.path)
        own = self._tensors.get(path) or (self._tensors.get(path[2:]) if path[0] == "user" else None)
        return own.content if own and (own.leaf.dtype, own.leaf.shape) == (leaf.dtype, leaf.shape) else None


def build(header: StateHeader, data: Bytes, own: OwnState | None) -> State:
    """Return the state. Its tensors share the memory of ``data``, whose digests have been checked."""
    meshes = meshes_of(header.meshes, own.values() if own else ())
    places, leaves = iter(_places(header.leaves)[0]), list[tuple[Path, object]]()
    for leaf in header.leaves:
        if leaf.kind == manifest.VALUE:
            value: object = values.loads(leaf.value)
        else:
            start, nbytes = next(places)
            value = _tensor(leaf, data[start : start + nbytes])
            if leaf.layout is not None and isinstance(value, torch.Tensor):
                value = assemble(value, leaf.layout, meshes)
        leaves.append((manifest.parse_path(leaf.path), value))
    state = nested(leaves) if leaves else {}
    if not isinstance(state, dict):
        raise Damaged("the header describes no dict", subject=_SUBJECT)
    return state


def _own(leaf: Leaf, meshes: dict[StagedMesh, int]) -> OwnTensor:
    local, layout = leaf, None
    if isinstance(leaf.value, DTensor):
        local = leaf._replace(value=leaf.value.to_local())
        layout = layout_part(leaf, meshes.setdefault(mesh_part(leaf.value.device_mesh), len(meshes)))
    shard = shard_of(local)
    path = manifest.path_text(leaf.path)
    staged = StagedLeaf(path, shard.kind, "", shard.dtype, tuple(shard.extent), layout)
    return OwnTensor(staged, content(shard.local), leaf.value)


def _tensor(leaf: StagedLeaf, raw: Bytes) -> object:
    if leaf.kind == manifest.TENSOR:
        dtype = getattr(torch, leaf.dtype)
        return torch.from_numpy(raw).view(dtype).reshape(leaf.shape) if raw.size else torch.empty(leaf.shape, dtype=dtype)
    if leaf.kind not in (manifest.ARRAY, manifest.SCALAR):
        raise Damaged(f"a leaf of kind {leaf.kind:.40}", subject=_SUBJECT)
    array = raw.view(dtypes.to_numpy(leaf.dtype)).reshape(leaf.shape)
    return array if leaf.kind == manifest.ARRAY else array[()]


def _places(leaves: Sequence[StagedLeaf]) -> tuple[list[tuple[int, int]], int]:
    """Return where each tensor begins and how many bytes it has, and the sum with the gaps."""
    places, end = list[tuple[int, int]](), 0
    for leaf in leaves:
        if leaf.kind != manifest.VALUE:
            if any(extent < 0 for extent in leaf.shape):
                raise Damaged(f"a tensor of shape {leaf.shape}", subject=_SUBJECT)
            start, nbytes = -(-end // ALIGN) * ALIGN, math.prod(leaf.shape) * dtypes.dtype(leaf.dtype).itemsize
            places.append((start, nbytes))
            end = start + nbytes
    return places, end
