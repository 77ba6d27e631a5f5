"""Assigns each chunk to one rank: every rank cuts its shards into chunks and takes its share of those that others have, too.

No communication is needed: all holders of a box compute the same split from the same list.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..storage.format.groups import WEIGHTS, group
from .chunk_info import DEVICE_CHUNK, HOST_CHUNK
from .chunks import Cut, cuts
from .coverage import coverage, total
from .planned_chunk import DeviceChunks, PlannedChunk, PlannedDerived
from .shards import Shard

SMALL = 64 << 10
"""Bytes up to which a shard of several ranks is not split, so that a reader asks one node for it."""

HOST_LEAST = 256 << 20
"""Bytes in host memory from which on a GPU codes them."""


@dataclass(frozen=True)
class GpuCoding:
    """What GPUs code. ``tensors``: whether they code the tensors in their memory. ``host``: the CUDA device that codes those in
    host memory; None: the node worker does."""

    tensors: bool = True
    host: int | None = None

    def suited(self, shards: Iterable[Shard]) -> GpuCoding:
        """The same, but nothing of host memory if that is too little for the device memory that the coding takes."""
        if self.host is None or sum(shard.nbytes for shard in shards if self._from_host(shard)) >= HOST_LEAST:
            return self
        return GpuCoding(self.tensors)

    def coder(self, shard: Shard) -> int | None:
        """The device that codes a shard. The node worker codes integers, since it also finds repetitions, and what is small."""
        if self._from_host(shard):
            return self.host
        return shard.device if self.tensors and 0 not in shard.extent and shard.format.is_float else None

    @staticmethod
    def _from_host(shard: Shard) -> bool:
        return shard.device is None and shard.format.is_float and shard.nbytes > SMALL


class HeldPiece(NamedTuple):
    """A piece of a shard that several ranks have. ``holders``: empty for all ranks. ``writer``: the rank that stores it."""

    shard: Shard
    cut: Cut
    holders: tuple[int, ...]
    writer: int


@dataclass(frozen=True)
class ChunkAssignment:
    """What one rank stores of its ``shards``. ``parts``: by the device that codes them (None: the node worker). ``sources``: by
    the number of a shard, the number of the shard that it seems to be derived from. ``coverage``: the coverage sums of the
    tensors that all ranks must have alike, and of those of which this rank is the first holder; ``owned_dtensors``: the DTensors
    among the latter. ``plain_tensors``: the tensors that all ranks must have alike, with dtypes and shapes, and with the tensors
    in whose memory they are. ``held``: the pieces of shards that several ranks have, those of derived shards included."""

    shards: tuple[Shard, ...]
    sources: Mapping[int, int]
    parts: Mapping[int | None, DeviceChunks]
    coverage: tuple[int, int]
    owned_dtensors: tuple[str, ...]
    plain_tensors: tuple[str, ...]
    held: tuple[HeldPiece, ...] = ()


def assign_chunks(
    shards: tuple[Shard, ...], sources: Mapping[int, int], *, rank: int, world_size: int, gpus: GpuCoding
) -> ChunkAssignment:
    """Cut shards into chunks and assign them. ``sources``: see ``ChunkAssignment``."""
    derived = {i: source for i, source in sources.items() if _is_derived(shards[i], shards[source])}
    everyone = tuple(range(world_size))
    dependents: dict[int, list[Shard]] = defaultdict(list)
    for i, source in derived.items():
        dependents[source].append(shards[i])
    alike: dict[tuple[int, ...], list[PlannedChunk]] = defaultdict(list)
    followers: dict[int, list[Shard]] = {}  # by the identity of their source
    for i, shard in enumerate(shards):
        if i not in derived:
            device = gpus.coder(shard)
            # Of host memory all ranks make the same chunks, whether they have a GPU or not.
            limit = HOST_CHUNK if device is None or shard.device is None else DEVICE_CHUNK
            packs, followers[id(shard)] = _group_of([shard, *dependents[i]]), dependents[i]
            alike[shard.holders or everyone] += [PlannedChunk(shard, cut, device, packs) for cut in cuts(shard, limit)]
    mine: dict[int | None, list[PlannedChunk]] = defaultdict(list)
    held = list[HeldPiece]()
    for holders, found in alike.items():
        shares = shares_of(found, holders)
        for writer, piece in shares:
            if writer == rank:
                mine[piece.device].append(piece)
        if len(holders) > 1:
            for writer, piece in shares:
                held.append(HeldPiece(piece.shard, piece.cut, piece.shard.holders, writer))
                for shard in followers[id(piece.shard)]:
                    held.append(HeldPiece(shard, _cut_like(shard, piece), shard.holders, writer))
    parts = {
        device: DeviceChunks(
            tuple(pieces), tuple(_follower(shard, piece) for piece in pieces for shard in followers[id(piece.shard)])
        )
        for device, pieces in mine.items()
    }
    terms = [(s, coverage(s.leaf.name, s.dtype, s.shape)) for s in shards if not s.holders or s.first == rank]
    tied = {i: f" tied to {shards[source].leaf.name}" for i, source in derived.items()}
    described = [(s.leaf.name, f"{s.dtype} {list(s.shape)}{tied.get(i, '')}") for i, s in enumerate(shards) if not s.holders]
    # A box without elements counts nothing, but its shape must be the same on all ranks, too.
    replicated = total(coverage(name, text, ()) for name, text in described)
    expected = total(term for shard, term in terms if shard.holders or rank == 0)
    owned_dtensors = tuple(shard.leaf.name for shard in shards if shard.first == rank)
    plain_tensors = tuple(f"{name} {text}" for name, text in described)
    return ChunkAssignment(shards, sources, parts, (replicated, expected), owned_dtensors, plain_tensors, tuple(held))


def _is_derived(shard: Shard, source: Shard) -> bool:
    """Whether a shard that is derived from the source can be derived from the source as it is stored."""
    if shard.dtype == source.dtype:
        return shard.selector == source.selector
    return shard.selector is None and (source.selector is None or source.selector.preserves_cast(source.dtype, shard.dtype))


def _follower(shard: Shard, source: PlannedChunk) -> PlannedDerived:
    """The same box of a shard that is derived from the source."""
    return PlannedDerived(PlannedChunk(shard, _cut_like(shard, source), source.device, source.group), source)


def _cut_like(shard: Shard, source: PlannedChunk) -> Cut:
    cut, size, of = source.cut, shard.itemsize, source.shard.itemsize
    return Cut(cut.box, cut.nbytes // of * size, cut.start // of * size)


def _group_of(shards: Iterable[Shard]) -> str:
    """The packs of a tensor and of those derived from it: all weights are in the packs of weights."""
    groups = {group(shard.leaf.name) for shard in shards}
    return WEIGHTS if WEIGHTS in groups else groups.pop()


def shares_of(pieces: list[PlannedChunk], holders: tuple[int, ...]) -> list[tuple[int, PlannedChunk]]:
    """The chunks that all ``holders`` have, each with the holder that stores it: the first one stores small shards; then each
    chunk, largest first, goes to the holder with the fewest bytes."""
    if len(holders) == 1:
        return [(holders[0], piece) for piece in pieces]
    found = [(holders[0], piece) for piece in pieces if piece.shard.nbytes <= SMALL]
    load = [(0, holder) for holder in holders[1:]] + [(sum(piece.nbytes for _, piece in found), holders[0])]
    heapq.heapify(load)
    large = [piece for piece in pieces if piece.shard.nbytes > SMALL]
    for piece in sorted(large, key=lambda piece: (-piece.nbytes, piece.shard.leaf.name, piece.box)):
        least, holder = load[0]
        heapq.heapreplace(load, (least + piece.nbytes, holder))
        found.append((holder, piece))
    return found
