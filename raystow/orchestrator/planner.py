"""Who stores what: every rank cuts its shards into chunks and takes its share of those that others hold too.

No rank asks another. All holders of a box compute the same split from the same list, so every chunk has one owner.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..storage.coding import dtypes
from ..storage.coding.kernels import Bytes
from ..storage.coding.rounded import Rounded
from ..storage.errors import StateError
from ..storage.format import values
from ..storage.format.boxes import Box
from ..storage.format.groups import OPTIMIZER, WEIGHTS, group
from ..storage.format.manifest import path_text
from ..workers.ipc.ring import SLOT
from ..workers.port import MODULUS, coverage
from .choices import Choices
from .cutting import Cut, cuts
from .lossy import rounding
from .lossy.choice import Lossy
from .lossy.rules import words_of
from .outline import Outline
from .relations import Relations
from .seen import Seen, Sight
from .shards import Shard, check_memory
from .state import Path, show

MAX_VALUES = 64 << 20
"""Bytes of plain values that one rank may save; more belongs into arrays."""

DEVICE_CHUNK = 16 << 20
"""Bytes of the largest chunk of a tensor on a GPU."""

SMALL = 64 << 10
"""Bytes up to which a shard that several ranks hold is not spread: who looks for it asks its first holder's node alone."""


@dataclass(frozen=True)
class Piece:
    """A chunk that this rank stores. ``device``: the CUDA device that codes it; None if the node worker does. ``group``: which
    packs it goes to. ``followed``: see ``jobs.Source``."""

    shard: Shard
    cut: Cut
    device: int | None
    group: str
    followed: str = ""

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
    def origin(self) -> int | None:
        """Where its words lie on the device, one behind the other; None if they are scattered."""
        place = self.shard.place
        return None if place is None else place + self.cut.start

    @property
    def address(self) -> int | None:
        """The same, if they are stored as they are there."""
        return self.origin if self.shard.rule is None else None

    @property
    def planes(self) -> tuple[int, ...]:
        """Those of its byte planes that are worth coding: the highest, and where words are rounded others as well."""
        rule = self.shard.rule
        return (self.dtype.width - 1,) if rule is None else rule.planes(self.dtype.name)

    def gather(self) -> Any:
        """A contiguous copy of its words as they are stored, made on the current stream of the device."""
        if self.shard.rule is None:
            return self._bits().contiguous()
        import torch

        return self._round(self._bits().clone(memory_format=torch.contiguous_format))

    def _round(self, words: Any) -> Any:
        """Round the words of a copy; what came of it is kept with the shard."""
        rule, (offset, extent) = self.shard.rule, self.box
        assert rule is not None
        rows, first = words.reshape(-1, extent[-1]), self.shard.offset[-1] + offset[-1]
        made, self.shard.findings[self.box] = rounding.rounded(rule, rows, self.dtype.name, first)
        return made

    def _bits(self) -> Any:
        return self.shard.bits[tuple(slice(a, a + n) for a, n in zip(*self.box, strict=True)) + (...,)]

    @property
    def identity(self) -> Any:
        """Equal for pieces that ``describe`` says the same of."""
        shard = self.shard
        of = shard.leaf.path, shard.kind, shard.dtype, shard.shape, shard.offset, shard.rule
        return *of, self.cut.box, self.group, self.followed

    def describe(self) -> dict[str, Any]:
        """The fields of its manifest row that are known before coding."""
        shard, leaf = self.shard, self.shard.leaf
        return {
            **_of_tensor(leaf.name, leaf.path, shard.kind, shard.dtype, shard.shape, self.group),
            "offset": [a + b for a, b in zip(shard.offset, self.box[0], strict=True)],
            "extent": self.box[1],
        }

    def copy(self, out: Bytes) -> None:
        """Copy the bytes, as they are stored, into ``out``, row-major."""
        if not out.size:
            return
        self._copy(out)
        if self.shard.rule is not None:
            import torch

            words = torch.from_numpy(out).view(words_of(self.dtype.itemsize))
            words.copy_(self._round(words).view(-1))

    def _copy(self, out: Bytes) -> None:
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


class Part(NamedTuple):
    """What a rank stores in any case, and what only if it turns out not to follow from that."""

    pieces: tuple[Piece, ...]
    followers: tuple[Follower, ...]


@dataclass(frozen=True)
class Division:
    """What one rank stores of its ``shards``: ``parts``, by the device that codes them (None: the node worker). ``sources``: by
    the number of a shard, that of the one from which it seems to follow. ``coverage``: the sums (see ``workers.port.coverage``)
    of what all ranks must hold alike, and of what this rank vouches for. ``vouched``: the DTensors that it vouches for, as the
    first of their mesh."""

    shards: tuple[Shard, ...]
    sources: Mapping[int, int]
    parts: Mapping[int | None, Part]
    coverage: tuple[int, int]
    vouched: tuple[str, ...]


class Planner:
    """What one rank knows from save to save. A training saves the same tensors again and again, and waits whenever this is
    worked out: so it is kept, without the tensors, and used again while they lie where they did. ``outline``: what the state
    looks like, ``seen``: what is known of each tensor. ``lossy``: what is rounded."""

    def __init__(self, lossy: Lossy | None = None) -> None:
        self.outline, self.seen = Outline(), Seen()
        self._relations, self._choices = Relations(), Choices(lossy or Lossy({}))
        self._last: Division | None = None
        self._key: list[Any] = []

    def divide(self, plan: SavePlan) -> Division:
        """On the thread that stages, which divides one save at a time. ``StateError`` if a tensor's memory ends before it."""
        for sight in plan.sights:  # of one that was seen before there may be less by now, in the same place
            check_memory(sight.leaf, sight.local, sight.known.reach)
        known = [sight.known for sight in plan.sights]
        sources = self._relations.of([k.likeness for k in known], lambda: plan.shards, plan.ready, save=plan.save)
        key = [shard.identity for shard in known]
        if self._last is None or sources is not self._last.sources or key != self._key:
            self._choices.ask(plan.shards)
            self._choices.choose(plan.shards, plan.ready)
            self._last, self._key = _divide(plan, plan.shards, sources), key
        else:
            for kept, sight in zip(self._last.shards, plan.sights, strict=True):
                kept.hold(sight.leaf, sight.local)
            if self._choices.choose(self._last.shards, plan.ready):
                self._last = _divide(plan, self._last.shards, sources)
        return self._last

    def let_go(self) -> None:
        """Of the tensors."""
        if self._last is not None:
            for shard in self._last.shards:
                shard.let_go()

    def look_again(self, plan: SavePlan) -> None:
        """See ``Relations``."""
        self._relations.look_again(plan.division.shards, plan.ready, save=plan.save)

    def forget(self, shard: Shard) -> None:
        """See ``Relations``."""
        self._relations.forget(shard)


@dataclass(frozen=True)
class SavePlan:
    """``sights``: of what this rank holds. ``values``: its plain values (name, path, JSON text). ``ready``: for each CUDA device
    an event, after which its tensors may be read on any stream. ``on_gpu``: what lies there is coded there. ``planner``: the same
    for all saves of this rank; ``save``: their number, the same on all ranks.

    What follows from these is worked out when it is first asked for: off the training thread.
    """

    rank: int
    world_size: int
    sights: tuple[Sight, ...]
    values: tuple[tuple[str, str, str], ...]
    ready: dict[int, Any]
    on_gpu: bool
    planner: Planner
    save: int

    @functools.cached_property
    def shards(self) -> tuple[Shard, ...]:
        """What this rank holds."""
        return tuple(sight.known.again(sight.leaf, sight.local) for sight in self.sights)

    @functools.cached_property
    def division(self) -> Division:
        """See ``Division``."""
        return self.planner.divide(self)

    @property
    def parts(self) -> Mapping[int | None, Part]:
        """See ``Division``."""
        return self.division.parts

    @property
    def coverage(self) -> tuple[int, int]:
        """See ``Division``."""
        return self.division.coverage

    @property
    def vouched(self) -> tuple[str, ...]:
        """See ``Division``."""
        return self.division.vouched

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Of all parts."""
        return tuple(piece for part in self.parts.values() for piece in part.pieces)

    @property
    def followers(self) -> tuple[Follower, ...]:
        """Of all parts."""
        return tuple(follower for part in self.parts.values() for follower in part.followers)

    @property
    def nbytes(self) -> int:
        """Raw bytes of what this rank stores."""
        return sum(piece.nbytes for piece in self.pieces)

    def rounded(self) -> dict[str, Rounded]:
        """What rounding has done to this rank's part of tensors, by name, when all is staged. Waits for the device.
        ``SaveFailed`` naming a tensor whose errors exceed their bound."""
        return {
            shard.leaf.name: rounding.read(shard.leaf.name, shard.rule, shard.findings.values())
            for shard in self.division.shards
            if shard.rule is not None and shard.findings
        }

    def look_again(self) -> None:
        """See what may follow from what, for the saves to come: before the tensors may change."""
        self.planner.look_again(self)

    def strayed(self, follower: Follower) -> None:
        """It did not follow. Other ranks that hold the tensor have not seen that: then it stays agreed until all look again."""
        if len(follower.piece.shard.holders or range(self.world_size)) == 1:
            self.planner.forget(follower.piece.shard)

    def let_go(self) -> None:
        """Everything is staged, or given up: let go of the tensors."""
        self.planner.let_go()


def _divide(plan: SavePlan, shards: tuple[Shard, ...], sources: Mapping[int, int]) -> Division:
    """``sources``: by the number of a shard that of the shard from which it follows."""
    follows = {i: source for i, source in sources.items() if _still_follows(shards[i], shards[source])}
    everyone = tuple(range(plan.world_size))
    dependents: dict[int, list[Shard]] = defaultdict(list)
    for i, source in follows.items():
        dependents[source].append(shards[i])
    alike: dict[tuple[int, ...], list[Piece]] = defaultdict(list)
    followers: dict[int, list[Shard]] = {}  # by the identity of the shard from which they follow
    for i, shard in enumerate(shards):
        if i not in follows:
            device = _coder(shard) if plan.on_gpu else None
            limit = SLOT if device is None else DEVICE_CHUNK
            packs, followers[id(shard)] = _group_of([shard, *dependents[i]]), dependents[i]
            followed = next((other.dtype for other in dependents[i] if other.dtype != shard.dtype), "")
            alike[shard.holders or everyone] += [Piece(shard, cut, device, packs, followed) for cut in cuts(shard, limit)]
    mine: dict[int | None, list[Piece]] = defaultdict(list)
    for holders, found in alike.items():
        for piece in share(found, holders, plan.rank):
            mine[piece.device].append(piece)
    parts = {
        device: Part(tuple(pieces), tuple(_follower(shard, piece) for piece in pieces for shard in followers[id(piece.shard)]))
        for device, pieces in mine.items()
    }
    weights = [(s, coverage(s.leaf.name, s.dtype, s.shape, math.prod(s.shape))) for s in shards]
    replicated = sum(weight for shard, weight in weights if not shard.holders)
    expected = sum(weight for shard, weight in weights if shard.first == plan.rank)
    vouched = tuple(shard.leaf.name for shard in shards if shard.holders and shard.first == plan.rank)
    return Division(shards, sources, parts, (replicated % MODULUS, expected % MODULUS), vouched)


def _still_follows(shard: Shard, source: Shard) -> bool:
    """Whether what follows from the source as it is does so from the source as it is stored."""
    if shard.dtype == source.dtype:
        return shard.asked == source.asked
    return shard.asked is None and (source.asked is None or source.asked.lets_follow(source.dtype, shard.dtype))


def _coder(shard: Shard) -> int | None:
    """The device that codes a shard. The node worker does better with integers: it finds what repeats."""
    return shard.device if 0 not in shard.extent and shard.format.is_float else None


def plan_save(
    state: Any, *, rank: int, world_size: int, on_gpu: bool = True, planner: Planner | None = None, save: int = 1
) -> SavePlan:
    """Plan a save; ``planner``: the same for all saves of a rank, and ``save`` their number. ``StateError`` naming the path if
    the state holds what cannot be stored; nothing is read or copied yet."""
    planner = planner or Planner()
    leaves = planner.outline.leaves(state)
    rows = tuple((leaf.name, path_text(leaf.path), values.dumps(leaf.value)) for leaf in leaves if not leaf.is_tensor)
    if sum(len(text) for _, _, text in rows) > MAX_VALUES:
        largest = max((leaf for leaf in leaves if not leaf.is_tensor), key=lambda leaf: len(values.dumps(leaf.value)))
        raise StateError(
            f"plain values take more than {MAX_VALUES >> 20} MiB",
            subject=show(largest.path),
            remedy="make it an array",
        )
    sights = planner.seen.look([leaf for leaf in leaves if leaf.is_tensor])
    ready = {device: _record_event(device) for device in {sight.known.device for sight in sights} if device is not None}
    return SavePlan(rank, world_size, sights, rows, ready, on_gpu, planner, save)


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
