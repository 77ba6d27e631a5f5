"""Who stores what: every rank cuts its shards into chunks and takes its share of those that others hold too.

No rank asks another. All holders of a box compute the same split from the same list, so every chunk has one owner.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..storage import values
from ..storage.boxes import Box
from ..storage.errors import StateError
from ..storage.kernels import Bytes
from ..storage.manifest import path_text
from ..workers.port import MODULUS, coverage
from ..workers.ring import SLOT
from .shards import Shard, shard_of
from .state import flatten, show

MAX_VALUES = 64 << 20
"""Bytes of plain values that one rank may save; more belongs into arrays."""

_OPTIMIZER = {"opt", "optim", "optimizer", "optimizers", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master"}


@dataclass(frozen=True)
class Piece:
    """A chunk that this rank stores: a box of the shard, in the shard's own coordinates."""

    shard: Shard
    box: Box

    @property
    def nbytes(self) -> int:
        """Bytes, at most ``SLOT``."""
        return math.prod(self.box[1]) * self.shard.itemsize

    def describe(self) -> dict[str, Any]:
        """The fields of its manifest row that are known before coding."""
        shard = self.shard
        return {
            "name": shard.leaf.name,
            "path": path_text(shard.leaf.path),
            "kind": shard.kind,
            "dtype": shard.dtype,
            "shape": shard.shape,
            "offset": [a + b for a, b in zip(shard.offset, self.box[0], strict=True)],
            "extent": self.box[1],
            "group": group(shard.leaf.name),
        }

    def copy(self, out: Bytes) -> None:
        """Copy the bytes into ``out``, row-major."""
        if not out.size:
            return
        source = self.shard.bits[tuple(slice(a, a + n) for a, n in zip(*self.box, strict=True)) + (...,)]
        if isinstance(source, np.ndarray):
            np.copyto(out.view(source.dtype).reshape(source.shape), source)
        else:
            import torch

            if self.shard.ready is not None:
                self.shard.ready.synchronize()
            torch.from_numpy(out).view(source.dtype).reshape(source.shape).copy_(source)


@dataclass(frozen=True)
class SavePlan:
    """``pieces``: what this rank stores. ``values``: its plain values (name, path, JSON text). ``replicated``: the coverage
    sum (see ``workers.port.coverage``) of what all ranks must hold alike; ``expected``: that of what this rank vouches for."""

    pieces: tuple[Piece, ...]
    values: tuple[tuple[str, str, str], ...]
    replicated: int
    expected: int

    @property
    def nbytes(self) -> int:
        """Raw bytes that this rank stores."""
        return sum(piece.nbytes for piece in self.pieces)


def plan_save(state: Any, *, rank: int, world_size: int) -> SavePlan:
    """Plan a save. ``StateError`` naming the path if the state holds what cannot be stored; nothing is read or copied yet."""
    leaves = flatten(state)
    rows = tuple((leaf.name, path_text(leaf.path), values.dumps(leaf.value)) for leaf in leaves if not leaf.is_tensor)
    if sum(len(text) for _, _, text in rows) > MAX_VALUES:
        largest = max((leaf for leaf in leaves if not leaf.is_tensor), key=lambda leaf: len(values.dumps(leaf.value)))
        raise StateError(
            f"plain values take more than {MAX_VALUES >> 20} MiB",
            subject=show(largest.path),
            remedy="make it an array",
        )
    shards = [shard_of(leaf) for leaf in leaves if leaf.is_tensor]
    everyone = tuple(range(world_size))
    alike: dict[tuple[int, ...], list[Piece]] = defaultdict(list)
    for shard in shards:
        alike[shard.holders or everyone] += [Piece(shard, box) for box in boxes(shard)]
    pieces = [piece for holders, found in alike.items() for piece in share(found, holders, rank)]
    weights = [(s, coverage(s.leaf.name, s.dtype, s.shape, math.prod(s.shape))) for s in shards]
    replicated = sum(weight for s, weight in weights if not s.holders)
    expected = sum(weight for s, weight in weights if s.first == rank)
    return SavePlan(tuple(pieces), rows, replicated % MODULUS, expected % MODULUS)


def boxes(shard: Shard, limit: int = SLOT) -> Iterator[Box]:
    """Cut a shard into boxes of at most ``limit`` bytes, each contiguous in row-major order. An empty shard has none, unless
    the tensor itself is empty: that one has a single empty box, so that the manifest names it."""
    extent = shard.extent
    if 0 in extent:
        if 0 in shard.shape:
            yield (0,) * len(extent), extent
        return
    whole = len(extent)  # dimensions from here on are taken whole
    row = shard.itemsize
    while whole and row * extent[whole - 1] <= limit:
        whole -= 1
        row *= extent[whole]
    if not whole:
        yield (0,) * len(extent), extent
        return
    step, cut = max(1, limit // row), whole - 1
    for outer in itertools.product(*(range(n) for n in extent[:cut])):
        for start in range(0, extent[cut], step):
            rows = min(step, extent[cut] - start)
            yield (*outer, start, *(0,) * (len(extent) - whole)), (*(1,) * cut, rows, *extent[whole:])


def share(pieces: list[Piece], holders: tuple[int, ...], rank: int) -> list[Piece]:
    """The pieces that ``rank`` takes of those that all ``holders`` have: the largest first, each to whoever has least so far."""
    if len(holders) == 1:
        return pieces
    load = [(0, holder) for holder in holders]
    mine = []
    for piece in sorted(pieces, key=lambda piece: (-piece.nbytes, piece.shard.leaf.name, piece.box)):
        least, holder = load[0]
        heapq.heapreplace(load, (least + piece.nbytes, holder))
        if holder == rank:
            mine.append(piece)
    return mine


def group(name: str) -> str:
    """The packs that a tensor goes to: those of the optimizer's state, or those of the weights and all else."""
    return "optimizer" if _OPTIMIZER & set(name.lower().split(".")) else "weights"
