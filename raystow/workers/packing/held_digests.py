"""The digests of what the ranks of a node compare with others in one attempt, until it is known that none differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ...state.chunk_info import RangeInfo
from ...state.replica_groups import combined
from ..protocol.messages import PARTS, DescribedRange, ReplicaAnswer, ReplicaQuestion

_Held = tuple[Sequence[RangeInfo], npt.NDArray[np.uint64]]
_DESCRIBED = 64  # ranges in one answer


class HeldDigests:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], _Held] = {}

    def add(self, rank: int, groups: Mapping[int, Sequence[RangeInfo]], digests: Mapping[int, bytes]) -> None:
        """Add the digests of a rank by group, as in ``EndSave``. ``groups``: what the ranges are. A group whose digests do not
        fit its ranges is left out."""
        for key, packed in digests.items():
            infos = groups.get(key, ())
            if infos and len(packed) == 16 * len(infos):
                self._held[rank, key] = infos, np.frombuffer(packed, "<u8").reshape(2, -1)

    def of(self, rank: int) -> tuple[tuple[int, int], ...]:
        """One digest of each group of a rank, by the group's key."""
        return tuple((key, combined(digests[0])) for (of, key), (_, digests) in self._held.items() if of == rank)

    def answer(self, question: ReplicaQuestion) -> ReplicaAnswer:
        """The answer to a question."""
        infos, digests = self._held.get((question.rank, question.group), ((), np.zeros((2, 0), np.uint64)))
        count = len(infos)
        if not question.ranges:
            return ReplicaAnswer(question, count, _parts(digests[0]))
        numbers = [number for number in question.ranges if 0 <= number < count][:_DESCRIBED]
        found = (DescribedRange(number, infos[number], *map(int, digests[:, number])) for number in numbers)
        return ReplicaAnswer(question, count, ranges=tuple(found))


def part_size(count: int) -> int:
    """The ranges in a part of a group."""
    return max(1, -(-count // PARTS))


def _parts(digests: npt.NDArray[np.uint64]) -> bytes:
    step = part_size(len(digests))
    if step > 1:
        parts = range(0, len(digests), step)
        digests = np.array([combined(digests[at : at + step]) for at in parts], np.uint64)
    return digests.astype("<u4").tobytes()
