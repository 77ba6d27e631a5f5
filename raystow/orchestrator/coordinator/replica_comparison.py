"""Compares the digests that the ranks of an attempt report, and finds which rank differs, in which tensor.

In most saves one digest of each group is all that ranks report. If ranks differ in a group, their nodes are asked, first for a
digest of each part of the group, then for those of the ranges that differ. A few ranks answer for all with the same digest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...state.chunk_info import RangeInfo
from ...state.replica_digests import RangeDigest, first_difference
from ...state.replica_groups import RANGE
from ...storage.coding import dtypes
from ...storage.errors import RaystowError
from ...storage.format.replica_difference import (
    BUFFER,
    EACH,
    MAJORITY,
    MINORITY,
    TENSOR,
    UNKNOWN,
    VALUE,
    ReplicaDifference,
)
from ...storage.limits import MAX_DIFFERENCES, MAX_NAME, MAX_SIDE
from ...workers.packing.held_digests import part_size
from ...workers.protocol.messages import DescribedRange, ReplicaAnswer, ReplicaQuestion

_GROUPS = 16  # groups of which nodes are asked
_SIDES = 8  # ranks that answer for all with the same digest


@dataclass
class _DifferingGroup:
    """A group in which ranks differ. ``sides``: the ranks with the same digest, by the lowest of them, which answers for them."""

    key: int
    sides: dict[int, tuple[int, ...]]
    parts: dict[int, ReplicaAnswer] = field(default_factory=dict)
    ranges: dict[int, ReplicaAnswer] = field(default_factory=dict)
    differing: tuple[int, ...] = ()
    """Numbers of ranges that differ: at most ``MAX_DIFFERENCES``."""

    def questions(self) -> list[ReplicaQuestion]:
        """What has not been answered."""
        if len(self.parts) < len(self.sides):
            return [ReplicaQuestion(rank, self.key) for rank in self.sides if rank not in self.parts]
        asked = self.differing
        return [ReplicaQuestion(rank, self.key, asked) for rank in self.sides if rank not in self.ranges] if asked else []

    def take(self, answer: ReplicaAnswer) -> None:
        """Note an answer."""
        rank = answer.question.rank
        if rank not in self.sides:
            return
        if answer.question.ranges:
            self.ranges[rank] = answer
            return
        self.parts[rank] = answer
        if len(self.parts) == len(self.sides):
            fitting = (one for one in self.parts.values() if one.count == answer.count and len(one.parts) % 4 == 0)
            found = [np.frombuffer(one.parts, "<u4") for one in fitting]
            if len(found) > 1 and len({len(one) for one in found}) == 1:
                step = part_size(answer.count)
                parts = np.flatnonzero((np.stack(found) != found[0]).any(axis=0))[:MAX_DIFFERENCES].tolist()
                numbers = [number for part in parts for number in range(part * step, min(answer.count, (part + 1) * step))]
                self.differing = tuple(numbers[:MAX_DIFFERENCES])


class ReplicaComparison:
    """The comparison of one attempt."""

    def __init__(self) -> None:
        self._digests: dict[int, dict[int, list[int]]] = defaultdict(dict)  # group -> digest -> ranks
        self._groups: dict[int, _DifferingGroup] = {}
        self.begun = 0.0
        """When all ranks had reported, in monotonic seconds."""

    def note(self, rank: int, digests: Iterable[tuple[int, int]]) -> None:
        """Note what a rank reports, once."""
        for group, digest in digests:
            self._digests[group].setdefault(digest, []).append(rank)

    def begin(self, now: float) -> None:
        """Compare what all ranks have reported. ``now``: monotonic seconds."""
        self.begun = now
        for key, by_digest in self._digests.items():
            if len(by_digest) > 1 and len(self._groups) < _GROUPS:
                sides = sorted(by_digest.values(), key=lambda ranks: (-len(ranks), ranks))[:_SIDES]
                self._groups[key] = _DifferingGroup(key, {min(ranks): tuple(sorted(ranks)) for ranks in sides})
        self._digests.clear()

    @property
    def is_open(self) -> bool:
        """Whether it waits for answers."""
        return any(group.questions() for group in self._groups.values())

    def questions(self, ranks: Collection[int]) -> tuple[ReplicaQuestion, ...]:
        """What the node of these ranks has to answer."""
        return tuple(one for group in self._groups.values() for one in group.questions() if one.rank in ranks)

    def take(self, answers: Iterable[ReplicaAnswer]) -> None:
        """Note the answers of a node."""
        for answer in answers:
            if (group := self._groups.get(answer.question.group)) is not None:
                group.take(answer)

    @property
    def differs(self) -> bool:
        """Whether ranks differ in something, also if their nodes have not said in what."""
        return bool(self._groups)

    def differences(self) -> tuple[ReplicaDifference, ...]:
        """What differs, by name: at most ``MAX_DIFFERENCES``."""
        by_name = defaultdict[str, list[tuple[RangeInfo, _Sides]]](list)
        for group in self._groups.values():
            for number in group.differing:
                described = {rank: one for rank, answer in group.ranges.items() for one in answer.ranges if one.number == number}
                if len({one.whole for one in described.values()}) > 1:
                    info = max((one.info for one in described.values()), key=lambda one: len(one.name))
                    sides = _Sides.of(info, group.sides, described)
                    by_name[_name(info, described.values())].append((info, sides))
        return tuple(_difference(name, found) for name, found in sorted(by_name.items()))[:MAX_DIFFERENCES]


@dataclass(frozen=True)
class _Sides:
    """The ranks that differ in one range, and where. ``first``: see ``first_difference``."""

    odd: frozenset[int]
    others: frozenset[int]
    stored: str
    first: tuple[int, bool] | None

    @staticmethod
    def of(info: RangeInfo, sides: Mapping[int, Sequence[int]], described: Mapping[int, DescribedRange]) -> _Sides:
        """Compare a range. ``sides``: see ``_DifferingGroup``; ``described``: the range, by the rank that answers."""
        ranks, answering = defaultdict[int, set[int]](set), dict[int, DescribedRange]()
        for rank, answer in described.items():
            ranks[answer.whole] |= {*sides[rank]}
            answering[answer.whole] = answer
        compared = frozenset().union(*ranks.values())
        most = max(ranks, key=lambda whole: (len(ranks[whole]), -min(ranks[whole])))
        majority = len(compared) > 2 and 2 * len(ranks[most]) > len(compared)
        written = next((whole for whole, of in ranks.items() if info.writer in of), most)
        one = most if majority else written
        others = frozenset(ranks[one])
        stored = UNKNOWN if not majority else MAJORITY if info.writer in others else MINORITY
        other = min((whole for whole in ranks if whole != one), key=lambda whole: min(ranks[whole]))
        return _Sides(compared - others, others, stored if info.dtype else EACH, _first(info, answering[one], answering[other]))


def _first(info: RangeInfo, one: DescribedRange, other: DescribedRange) -> tuple[int, bool] | None:
    if not info.dtype:
        return None
    try:
        itemsize = dtypes.dtype(info.dtype).itemsize
    except RaystowError:
        return None
    nbytes = math.prod(info.extent) * itemsize
    if not 0 < nbytes <= RANGE or len(info.offset) != len(info.extent):  # not what a rank compares
        return None
    found = (RangeDigest(each.whole, each.first) for each in (one, other))
    return first_difference(*found, nbytes=nbytes, itemsize=itemsize)


def _name(info: RangeInfo, described: Iterable[DescribedRange]) -> str:
    """The name of what differs. Of the structure, where one digest is of several names, those that some ranks lack."""
    named = [one.info.name.split(", ") for one in described]
    every = [*dict.fromkeys(name for names in named for name in names)]
    lacking = [name for name in every if name and not all(name in names for names in named)]
    return info.name if info.dtype or not lacking else ", ".join(lacking)[:MAX_NAME]


def _difference(name: str, found: list[tuple[RangeInfo, _Sides]]) -> ReplicaDifference:
    """What differs in one tensor, from its ranges."""
    found.sort(key=lambda one: one[0].offset)
    info, first = found[0]
    odd = frozenset[int]().union(*(sides.odd for _, sides in found))
    others = frozenset[int]().union(*(sides.others for _, sides in found)) - odd
    stored = {sides.stored for _, sides in found}
    place = _place(info, first.first)
    return ReplicaDifference(
        name=name,
        kind=VALUE if not info.dtype else BUFFER if info.buffer else TENSOR,
        odd=tuple(sorted(odd)[:MAX_SIDE]),
        others=tuple(sorted(others)[:MAX_SIDE]),
        odd_ranks=len(odd),
        other_ranks=len(others),
        stored=stored.pop() if len(stored) == 1 else UNKNOWN,
        first=place,
        within=0 if not info.dtype else 1 if first.first is not None else math.prod(info.extent),
        elements=1 if len(found) == 1 and first.first is not None and first.first[1] else 0,
    )


def _place(info: RangeInfo, first: tuple[int, bool] | None) -> tuple[int, ...]:
    """The index of an element of a range in its tensor."""
    if first is None:
        return info.offset
    number, index = first[0], list[int]()
    for size in reversed(info.extent):
        index.append(number % size)
        number //= size
    return tuple(low + at for low, at in zip(info.offset, reversed(index), strict=True))
