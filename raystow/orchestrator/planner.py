"""Who stores what: every rank cuts its shards into chunks and takes its share of those that others hold too.

No rank asks another. All holders of a box compute the same split from the same list, so every chunk has one owner.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..storage import dtypes, values
from ..storage.boxes import Box
from ..storage.errors import StateError
from ..storage.kernels import Bytes
from ..storage.manifest import path_text
from ..workers.port import MODULUS, coverage
from ..workers.ring import SLOT
from .relations import Relations
from .shards import Shard, shard_of
from .state import Path, flatten, show

MAX_VALUES = 64 << 20
"""Bytes of plain values that one rank may save; more belongs into arrays."""

DEVICE_CHUNK = 16 << 20
"""Bytes of the largest chunk of a tensor on a GPU."""

SMALL = 64 << 10
"""Bytes up to which a shard that several ranks hold is not spread: who looks for it asks its first holder's node alone."""

WEIGHTS, OPTIMIZER = "weights", "optimizer"
"""Groups of packs."""

_OPTIMIZER = {"opt", "optim", "optimizer", "optimizers", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master"}


class Cut(NamedTuple):
    """A box of a shard, in the shard's own coordinates, and its bytes. ``start``: the first of them, where the shard's elements
    lie one behind the other."""

    box: Box
    nbytes: int
    start: int


@dataclass(frozen=True)
class Piece:
    """A chunk that this rank stores. ``device``: the CUDA device that codes it; None if the node worker does. ``group``: which
    packs it goes to."""

    shard: Shard
    cut: Cut
    device: int | None
    group: str

    @property
    def box(self) -> Box:
        """See ``Cut``."""
        return self.cut.box

    @property
    def nbytes(self) -> int:
        """Bytes: at most ``SLOT``, or ``DEVICE_CHUNK`` where a GPU codes it."""
        return self.cut.nbytes

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.shard.leaf.name

    @property
    def dtype(self) -> dtypes.DType:
        """What its words are."""
        return self.shard.format

    @property
    def address(self) -> int | None:
        """Where its words lie on the device, one behind the other; None if they are scattered."""
        place = self.shard.place
        return None if place is None else place + self.cut.start

    def gather(self) -> Any:
        """A contiguous copy of its words, made on the current stream of the device."""
        return self._bits().contiguous()

    def _bits(self) -> Any:
        return self.shard.bits[tuple(slice(a, a + n) for a, n in zip(*self.box, strict=True)) + (...,)]

    @property
    def identity(self) -> Any:
        """Equal for pieces that ``describe`` says the same of."""
        shard = self.shard
        return shard.leaf.path, shard.kind, shard.dtype, shard.shape, shard.offset, self.cut.box, self.group

    def describe(self) -> dict[str, Any]:
        """The fields of its manifest row that are known before coding."""
        shard, leaf = self.shard, self.shard.leaf
        return {
            **_of_tensor(leaf.name, leaf.path, shard.kind, shard.dtype, shard.shape, self.group),
            "offset": [a + b for a, b in zip(shard.offset, self.box[0], strict=True)],
            "extent": self.box[1],
        }

    def copy(self, out: Bytes) -> None:
        """Copy the bytes into ``out``, row-major."""
        if not out.size:
            return
        source = self._bits()
        if isinstance(source, np.ndarray):
            np.copyto(out.view(source.dtype).reshape(source.shape), source)
        else:
            import torch

            with torch.cuda.stream(torch.cuda.Stream(source.device)):  # whatever the training has queued up is not waited for
                torch.from_numpy(out).view(source.dtype).reshape(source.shape).copy_(source)


@dataclass(frozen=True)
class Follower:
    """A chunk that is not stored if every element follows from that of the chunk ``source``, which has the same box."""

    piece: Piece
    source: Piece

    def describe(self) -> dict[str, Any]:
        """The fields of its manifest row that are known before it is looked at."""
        return {**self.piece.describe(), "source": self.source.name, "source_dtype": self.source.dtype.name}


@dataclass(frozen=True)
class SavePlan:
    """``shards``: what this rank holds. ``values``: its plain values (name, path, JSON text). ``ready``: for each CUDA device an
    event, after which its tensors may be read on any stream. ``on_gpu``: what lies there is coded there. ``relations``: finds
    what need not be stored. ``save``: the number of this save, the same on all ranks.

    What follows from these is worked out when it is first asked for: off the training thread.
    """

    rank: int
    world_size: int
    shards: tuple[Shard, ...]
    values: tuple[tuple[str, str, str], ...]
    ready: dict[int, Any]
    on_gpu: bool
    relations: Relations
    save: int

    @functools.cached_property
    def coverage(self) -> tuple[int, int]:
        """The sums (see ``workers.port.coverage``) of what all ranks must hold alike, and of what this rank vouches for."""
        weights = [(s, coverage(s.leaf.name, s.dtype, s.shape, math.prod(s.shape))) for s in self.shards]
        replicated = sum(weight for shard, weight in weights if not shard.holders)
        expected = sum(weight for shard, weight in weights if shard.first == self.rank)
        return replicated % MODULUS, expected % MODULUS

    @property
    def vouched(self) -> tuple[str, ...]:
        """The DTensors that this rank, as the first of their mesh, vouches for."""
        return tuple(shard.leaf.name for shard in self.shards if shard.holders and shard.first == self.rank)

    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What this rank stores in any case."""
        everyone = tuple(range(self.world_size))
        alike: dict[tuple[int, ...], list[Piece]] = defaultdict(list)
        for i, shard in enumerate(self.shards):
            if i not in self._sources:
                device = self._coder(shard)
                limit = SLOT if device is None else DEVICE_CHUNK
                packs = _group_of([shard, *self._dependents[i]])
                alike[shard.holders or everyone] += [Piece(shard, cut, device, packs) for cut in cuts(shard, limit)]
        return tuple(piece for holders, found in alike.items() for piece in share(found, holders, self.rank))

    @functools.cached_property
    def followers(self) -> tuple[Follower, ...]:
        """What follows from ``pieces``, most likely: chunks of other tensors, to be stored only if it turns out not to."""
        of = {id(self.shards[i]): shards for i, shards in self._dependents.items() if shards}
        return tuple(_follower(shard, piece) for piece in self.pieces for shard in of.get(id(piece.shard), ()))

    @functools.cached_property
    def _sources(self) -> dict[int, int]:
        """By the number of a shard, that of the shard from which it follows."""
        return self.relations.of(self.shards, self.ready, save=self.save)

    @functools.cached_property
    def _dependents(self) -> dict[int, list[Shard]]:
        """By the number of a shard, those that follow from it."""
        found: dict[int, list[Shard]] = defaultdict(list)
        for i, source in self._sources.items():
            found[source].append(self.shards[i])
        return found

    def _coder(self, shard: Shard) -> int | None:
        """The device that codes a shard. The node worker does better with integers: it finds what repeats."""
        return shard.device if self.on_gpu and 0 not in shard.extent and shard.format.is_float else None

    @property
    def nbytes(self) -> int:
        """Raw bytes of what this rank stores."""
        return sum(piece.nbytes for piece in self.pieces)

    def strayed(self, follower: Follower) -> None:
        """It did not follow. Other ranks that hold the tensor have not seen that: then it stays agreed until all look again."""
        if len(follower.piece.shard.holders or range(self.world_size)) == 1:
            self.relations.forget(follower.piece.shard)


def plan_save(
    state: Any, *, rank: int, world_size: int, on_gpu: bool = True, relations: Relations | None = None, save: int = 1
) -> SavePlan:
    """Plan a save; ``relations``: the same for all saves of a rank, and ``save`` their number. ``StateError`` naming the path if
    the state holds what cannot be stored; nothing is read or copied yet."""
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
    ready = {device: _record_event(device) for device in {shard.device for shard in shards} if device is not None}
    return SavePlan(rank, world_size, tuple(shards), rows, ready, on_gpu, relations or Relations(), save)


def _record_event(device: int) -> Any:
    import torch

    return torch.cuda.current_stream(device).record_event()


def _follower(shard: Shard, source: Piece) -> Follower:
    """The same box of a shard that follows from the source's."""
    cut, size, of = source.cut, shard.itemsize, source.shard.itemsize
    same = Cut(cut.box, cut.nbytes // of * size, cut.start // of * size)
    return Follower(Piece(shard, same, source.device, source.group), source)


def _group_of(shards: Iterable[Shard]) -> str:
    """The packs of a tensor and of what follows from it: whoever wants the weights alone finds all of them in theirs."""
    return WEIGHTS if any(group(shard.leaf.name) == WEIGHTS for shard in shards) else OPTIMIZER


def cuts(shard: Shard, limit: int) -> tuple[Cut, ...]:
    """Cut a shard into boxes of at most ``limit`` bytes, each contiguous in row-major order. An empty shard has none, unless
    the tensor itself is empty: that one has a single empty box, so that the manifest names it."""
    if 0 in shard.extent:
        return (Cut(((0,) * len(shard.extent), shard.extent), 0, 0),) if 0 in shard.shape else ()
    return _cut(shard.extent, shard.itemsize, limit)


@functools.lru_cache(maxsize=4096)
def _cut(extent: tuple[int, ...], itemsize: int, limit: int) -> tuple[Cut, ...]:
    whole = len(extent)  # dimensions from here on are taken whole
    row = itemsize
    while whole and row * extent[whole - 1] <= limit:
        whole -= 1
        row *= extent[whole]
    if not whole:
        return (Cut(((0,) * len(extent), extent), row, 0),)
    step, cut, end, found = max(1, limit // row), whole - 1, 0, list[Cut]()
    for outer in itertools.product(*(range(n) for n in extent[:cut])):
        for start in range(0, extent[cut], step):
            rows = min(step, extent[cut] - start)
            box = (*outer, start, *(0,) * (len(extent) - whole)), (*(1,) * cut, rows, *extent[whole:])
            found.append(Cut(box, rows * row, end))
            end += rows * row
    return tuple(found)


def share(pieces: list[Piece], holders: tuple[int, ...], rank: int) -> list[Piece]:
    """The pieces that ``rank`` takes of those that all ``holders`` have: small shards are the first holder's; then, the largest
    first, each piece goes to whoever has least so far."""
    if len(holders) == 1:
        return pieces
    small = [piece for piece in pieces if piece.shard.nbytes <= SMALL]
    mine = list(small) if rank == holders[0] else []
    load = [(0, holder) for holder in holders[1:]] + [(sum(piece.nbytes for piece in small), holders[0])]
    heapq.heapify(load)
    large = [piece for piece in pieces if piece.shard.nbytes > SMALL]
    for piece in sorted(large, key=lambda piece: (-piece.nbytes, piece.shard.leaf.name, piece.box)):
        least, holder = load[0]
        heapq.heapreplace(load, (least + piece.nbytes, holder))
        if holder == rank:
            mine.append(piece)
    return mine


@functools.lru_cache(maxsize=1 << 14)
def _of_tensor(name: str, path: Path, kind: str, dtype: str, shape: tuple[int, ...], group: str) -> dict[str, Any]:
    """What all chunks of a tensor say, in all saves."""
    return {"name": name, "path": path_text(path), "kind": kind, "dtype": dtype, "shape": shape, "group": group}


def group(name: str) -> str:
    """The packs that a tensor goes to: those of the optimizer's state, or those of the weights and all else."""
    return OPTIMIZER if _OPTIMIZER & set(name.lower().split(".")) else WEIGHTS
