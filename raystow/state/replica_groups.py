"""Which ranks compare which parts of the tensors that several of them hold: computed without communication.

Each *range* is compared by its digests. All holders compare the ranges of small tensors in every save. Ranges of larger tensors
are compared by the rank that stores them, the writer, and one or two further holders, other ones in each save, so that all have
been compared with the writer after as many saves as there are holders, at most. Two, since with three digests it is known which
one is odd.

Ranges that the same ranks compare form a *group*, whose key is a digest of its description. So the digests of two ranks are
compared only if both describe the same ranges.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from ..storage.coding.digest import stored_digest
from ..storage.coding.kernels import Bytes
from ..storage.limits import MAX_NAME
from .assignment import HeldPiece
from .chunk_info import RangeInfo
from .chunks import Cut, cuts_of_extent
from .shard_range import ShardRange
from .wrapper_tensors import DESCRIPTION, WRAPPER

if TYPE_CHECKING:
    import torch

RANGE = 1 << 20
"""Bytes of the largest range, and of the largest tensor that all holders compare in every save."""

Compared = Literal["all", "small", "off", "whole"]
"""What is compared: in a save all tensors, small ones, or none; after a restore all tensors, by all holders at once."""

_STRUCTURE, _NAMED = 4096, 8  # digests of the structure, and names that one of them has at most
_VALUE_GROUPS = 16  # groups of plain values, one for each key of the state's uppermost dict; others are in one group
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of batch norms, of which each rank of DDP has its own


@dataclass(frozen=True)
class ReplicaRange(ShardRange):
    """Contiguous elements of a shard, in row-major order. As a source of digests it has the properties of a chunk."""

    info: RangeInfo

    @property
    def address(self) -> int | None:
        """``origin``: nothing is rounded."""
        return self.origin

    def gather(self) -> torch.Tensor:
        """A contiguous copy of its words, made on the current stream of the device."""
        words: torch.Tensor = self.bits
        return words.contiguous()

    def bytes(self) -> Bytes:
        """Its bytes, of a shard in host memory."""
        words = np.ascontiguousarray(self.bits)
        return words.reshape(-1).view(np.uint8)


@dataclass(frozen=True, eq=False)
class ReplicaGroup:
    """Ranges that the same ranks compare."""

    key: int
    ranges: tuple[ReplicaRange, ...]
    names: tuple[str, ...] = ()
    """Empty: the key determines them."""

    @functools.cached_property
    def numbers(self) -> Mapping[int | None, list[int]]:
        """The numbers of its ranges by their CUDA device; None for host memory."""
        found = defaultdict[int | None, list[int]](list)
        for number, one in enumerate(self.ranges):
            found[one.shard.device].append(number)
        return dict(found)

    @property
    def devices(self) -> list[int]:
        """The CUDA devices of its ranges."""
        return [device for device in self.numbers if device is not None]

    @property
    def infos(self) -> tuple[RangeInfo, ...]:
        """What the ranges are."""
        return tuple(one.info for one in self.ranges)


@dataclass(frozen=True)
class ValueGroup:
    """Plain values that all ranks with the same ones compare, or the structure of the state: names and digests."""

    key: int
    names: tuple[str, ...]
    digests: tuple[int, ...]

    @property
    def infos(self) -> tuple[RangeInfo, ...]:
        """What the values are."""
        return tuple(RangeInfo(name) for name in self.names)


class ReplicaGroups:
    """The groups of one plan of a rank. ``held``: the pieces that other ranks have, too. ``buffers``: names of tensors that are
    buffers of modules."""

    def __init__(self, held: Sequence[HeldPiece], rank: int, world_size: int, buffers: frozenset[str] = frozenset()) -> None:
        self._rank, self._everyone, self._buffers = rank, tuple(range(world_size)), buffers
        self._small = defaultdict[tuple[int, ...], list[HeldPiece]](list)
        self._large = defaultdict[tuple[tuple[int, ...], int], list[HeldPiece]](list)
        for piece in held:
            if not piece.cut.nbytes:
                continue
            if piece.shard.nbytes <= RANGE:
                self._small[piece.holders].append(piece)
            else:
                self._large[piece.holders, piece.writer].append(piece)
        self._made: dict[object, ReplicaGroup] = {}

    def of(self, save: int, compared: Compared) -> list[ReplicaGroup]:
        """The groups that this rank compares in its ``save``-th save."""
        found = list[ReplicaGroup]()
        if compared != "off":
            for holders, pieces in self._small.items():
                found.append(self._group(("small", holders), pieces))
        if compared in ("all", "whole"):
            for (holders, writer), pieces in self._large.items():
                if compared == "whole" or self._rank in comparing(holders or self._everyone, writer, save):
                    found.append(self._group((writer, holders), pieces))
        return found

    def _group(self, of: tuple[object, tuple[int, ...]], pieces: Sequence[HeldPiece]) -> ReplicaGroup:
        if of not in self._made:
            ranges = [one for piece in pieces for one in self._ranges(piece)]
            ranges.sort(key=lambda one: (one.info.name, one.info.offset))
            described = msgspec.msgpack.encode([one.info for one in ranges])
            self._made[of] = ReplicaGroup(_key(f"{len(self._everyone)} {of}\0".encode() + described), tuple(ranges))
        return self._made[of]

    def _ranges(self, piece: HeldPiece) -> Iterator[ReplicaRange]:
        shard, (low, extent) = piece.shard, piece.cut.box
        name = shard.leaf.name
        buffer = name in self._buffers or name.endswith(_STATISTICS)
        for cut in cuts_of_extent(tuple(extent), shard.itemsize, RANGE):
            size, offset = cut.box[1], tuple(a + b for a, b in zip(low, cut.box[0], strict=True))
            place = tuple(a + b for a, b in zip(shard.offset, offset, strict=True))
            info = RangeInfo(name, shard.dtype, place, tuple(size), piece.writer, buffer)
            yield ReplicaRange(shard, Cut((offset, size), cut.nbytes, piece.cut.start + cut.start), info)


def comparing(holders: tuple[int, ...], writer: int, save: int) -> tuple[int, ...]:
    """The ranks that compare what ``writer`` stores of a large tensor in a save: the writer, and two others, if there are two."""
    others = len(holders) - 1
    place, extra = holders.index(writer), min(2, others)
    steps = {(save * extra + i) % others for i in range(extra)}
    return writer, *(holders[(place + 1 + step) % len(holders)] for step in sorted(steps))


_DESCRIPTION, _WRAPPER = f", {json.dumps(DESCRIPTION)}]", json.dumps(WRAPPER)[:-1]


def shared_values(values: Iterable[tuple[str, str, str]], own: Iterable[str]) -> list[tuple[str, str, str]]:
    """The plain values, given as name, path and JSON text, that all ranks should have. ``own``: paths below which each rank has
    its own."""
    prefixes = tuple(path[:-1] for path in own)
    exact, below = {f"{prefix}]" for prefix in prefixes}, tuple(f"{prefix}," for prefix in prefixes)
    return [row for row in values if row[1] not in exact and not row[1].startswith(below)]


def value_groups(values: Iterable[tuple[str, str, str]], world_size: int) -> list[ValueGroup]:
    """The groups of plain values, given as name, path and JSON text."""
    by_key = defaultdict[str, list[tuple[str, str]]](list)
    for name, path, text in values:
        around = path.partition(",")[0]
        by_key[around if around in by_key or len(by_key) < _VALUE_GROUPS else ""].append((name, text))
    found = list[ValueGroup]()
    for around, rows in by_key.items():
        rows.sort()
        names = tuple(name for name, _ in rows)
        key = _key("\0".join((f"values {world_size} {around}", *names)).encode())
        found.append(ValueGroup(key, names, tuple(_key(text.encode()) for _, text in rows)))
    return found


def describes_part(path: str, text: str) -> bool:
    """Whether a plain value is what a wrapper says of its rank's part, which a rank without a part does not have."""
    return path.endswith(_DESCRIPTION) and text.startswith(_WRAPPER)


def structure_group(leaves: Iterable[tuple[str, str]], world_size: int) -> ValueGroup:
    """The group that compares which tensors and plain values ranks have, and in which lists, tuples and dicts. ``leaves``: names
    and paths of those that all ranks should have. All ranks have this group, whatever they have: names are spread over a fixed
    number of digests."""
    spread = [list[tuple[str, str]]() for _ in range(_STRUCTURE)]
    for name, path in leaves:
        spread[zlib.crc32(name.encode()) % _STRUCTURE].append((path, name))
    names = tuple(", ".join(name for _, name in sorted(few)[:_NAMED])[:MAX_NAME] for few in spread)
    digests = (_key("\0".join(path for path, _ in sorted(few)).encode()) if few else 0 for few in spread)
    return ValueGroup(_key(f"structure {world_size}".encode()), names, tuple(digests))


def combined(digests: npt.NDArray[np.uint64]) -> int:
    """One digest of the digests of a group."""
    return int.from_bytes(stored_digest(digests.astype("<u8").tobytes())[:8], "little")


def _key(described: bytes) -> int:
    return int.from_bytes(stored_digest(described)[:8], "little")
