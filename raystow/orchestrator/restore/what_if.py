"""Estimates what each rank of a world of another size would read of a version.

Assumption: a tensor that was saved in several boxes along a dimension is split evenly along the first such dimension again, as
``torch.chunk`` does; every rank reads all of any other tensor.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

from ...storage.errors import StateError
from ...storage.format.boxes import Box
from ...storage.format.manifest import Chunk
from ...storage.format.parts import part_of
from ...storage.versions.reader import PackReader
from ...storage.versions.version import Version

MOST_RANKS = 1 << 17
MOST_READS = 1 << 27
"""Chunks that all ranks of a plan read: they take an hour of CPU."""
MOST_READS_OF_A_NODE = 1 << 24
"""Those of them that one node saved: they take 100 bytes each."""
_Share = dict[int, float]  # number of a chunk in its fragment -> the part of its elements that is needed


@dataclass(frozen=True)
class Reads:
    """Reads of a rank or node: ``nbytes`` are stored bytes. ``needed``: bytes of the needed elements. ``passed_on``:
    bytes that another node reads from the store."""

    nbytes: int = 0
    chunks: int = 0
    requests: int = 0
    needed: float = 0.0
    passed_on: float = 0.0

    def __add__(self, other: Reads) -> Reads:
        return Reads(*map(operator.add, astuple(self), astuple(other)))


@dataclass(frozen=True)
class WorldPlan:
    """``ranks``: what each would read if it were alone. ``nodes``: what the ranks of each read together, every byte once.
    ``store``: what all nodes together read from the store, every byte once."""

    ranks: tuple[Reads, ...]
    nodes: tuple[Reads, ...]
    store: Reads

    @property
    def amplification(self) -> float:
        """Bytes read from the store for each byte that is needed: chunks are read whole."""
        return self.store.nbytes / self.store.needed if self.store.needed else 1.0

    def seconds(self, *, store: float, peer: float) -> float:
        """Until the last node is done, if each reads so many bytes per second from the store and from other nodes."""
        return max(((node.nbytes - node.passed_on) / store + node.passed_on / peer for node in self.nodes), default=0.0)


def plan_world(
    version: Version, world_size: int, *, per_node: int, whole: bool = False, most_reads: int = MOST_READS
) -> WorldPlan:
    """The plan for ``world_size`` ranks, ``per_node`` of them on each node. ``whole``: every rank reads every tensor whole.

    Of a chunk that several nodes want, each is taken to read an equal part from the store. Reads the manifest twice, and raises
    what reading it raises. Memory: one fragment, and some 100 bytes for each of its chunks and each rank that reads it.

    Raises:
        StateError: There are more than ``MOST_RANKS`` ranks, or together they would read more than ``most_reads`` chunks, or
            ``MOST_READS_OF_A_NODE`` that one node saved.
    """
    if world_size > MOST_RANKS:
        raise StateError(f"no plan is made for {world_size} ranks", subject=repr(version), remedy=f"use up to {MOST_RANKS}")
    tensors, reader, left = version.contents.tensors, version.reader(), most_reads
    ranks, nodes, store = [Reads()] * world_size, [Reads()] * -(-world_size // per_node), Reads()
    for _, fragment in version.walk():
        shares, reads = defaultdict[int, _Share](dict), 0
        for number, chunk in enumerate(fragment.chunks):
            if part_of(chunk.name):  # the ranks do not read it
                continue
            wanted = _wanted(chunk, world_size, None if whole else tensors[chunk.name].split)
            if (reads := reads + len(wanted)) > min(left, MOST_READS_OF_A_NODE):
                most = f"{most_reads} chunks" if reads > left else f"{MOST_READS_OF_A_NODE} chunks of node {fragment.node}"
                what = f"{world_size} ranks would read more than {most}"
                raise StateError(what, subject=repr(version), remedy="plan for fewer ranks")
            for rank, part in wanted.items():
                shares[rank][number] = part
        left -= reads
        groups = defaultdict[int, list[_Share]](list)
        for rank, share in shares.items():
            groups[rank // per_node].append(share)
            ranks[rank] += _reads(reader, fragment.chunks, share)
        together = {node: _together(group) for node, group in groups.items()}
        askers = Counter(number for share in together.values() for number in share)
        for node, share in together.items():
            nodes[node] += _reads(reader, fragment.chunks, share, askers)
        store += _reads(reader, fragment.chunks, _together(together.values()))
    return WorldPlan(tuple(ranks), tuple(nodes), store)


def _wanted(row: Chunk, world_size: int, dim: int | None) -> Mapping[int, float]:
    """The part of a chunk that each rank needs. ``dim``: the dimension along which the tensor is split."""
    if dim is None:
        return dict.fromkeys(range(world_size), 1.0)
    if 0 in row.extent:
        return {}
    step, first, size = -(-row.shape[dim] // world_size), row.offset[dim], row.extent[dim]
    ranks = range(first // step, (first + size - 1) // step + 1)
    return {r: (min(first + size, (r + 1) * step) - max(first, r * step)) / size for r in ranks}


def _together(shares: Iterable[_Share]) -> _Share:
    parts: _Share = defaultdict(float)
    for share in shares:
        for number, part in share.items():
            parts[number] = min(1.0, parts[number] + part)
    return parts


def _reads(reader: PackReader, chunks: Sequence[Chunk], share: _Share, askers: Mapping[int, int] | None = None) -> Reads:
    """``askers``: how many nodes need each chunk."""
    runs = reader.whole(chunks[number] for number in share)
    places = dict[tuple[str, Box], tuple[object, int]]()  # of each chunk: the place of its bytes, and their number
    for run in runs:
        for place in run.places:
            at = (run.key, place.chunk.start, place.size), place.size + (place.base.nbytes if place.base else 0)
            places.update(((piece.chunk.name, piece.chunk.box), at) for piece in place.pieces)
    # By place in a pack: derived tensors have the place of their source.
    needed, passed = dict[object, float](), dict[object, float]()
    for number, part in share.items():
        key, size = places[chunks[number].name, chunks[number].box]
        needed[key] = max(size * part, needed.get(key, 0.0))
        passed[key] = max(size * (1 - 1 / askers[number]) if askers else 0.0, passed.get(key, 0.0))
    requests = sum(1 + len(list(run.bases)) for run in runs)
    return Reads(sum(run.nbytes for run in runs), len(share), requests, sum(needed.values()), sum(passed.values()))
