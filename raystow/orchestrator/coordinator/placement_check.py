"""Finds a tensor whose elements ranks do not store once each, and these ranks. Asks nodes, since it happens in few saves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt

from ...state.coverage import PRIME
from ...storage.format.boxes import Box, overlap
from ...storage.format.rank_spans import member_text, ranks_text
from ...workers.protocol.messages import PLACEMENT, ReplicaAnswer, ReplicaQuestion

_RANKS = 1024  # of more ranks, nodes are not asked
_LISTED = 8
_GAP = "there is a gap or an overlap, or the ranks disagree on its placement"

_Entries = npt.NDArray[np.uint32]
"""[tensors, 3]: a number of the name, ascending; what the rank's chunks count; and what the whole tensor does."""
_Boxes = list[tuple[int, Box]]


class PlacementCheck:
    """``ranks``: those that have delivered. ``name``: the tensor, if it is known."""

    def __init__(self, ranks: Collection[int], name: str = "") -> None:
        self._ranks, self._name = ([] if len(ranks) > _RANKS else sorted(ranks)), name
        self._entries: dict[int, _Entries] = {}
        self._last = 1 << 32  # the last number of a name of which all ranks have said what they have
        self._numbers: dict[int, int] = {}  # by rank: the place of the tensor among its entries
        self._boxes: dict[int, ReplicaAnswer] = {}

    def questions(self, ranks: Collection[int]) -> tuple[ReplicaQuestion, ...]:
        """What the node of these ranks has to answer."""
        return tuple(one for one in self._questions() if one.rank in ranks)

    @property
    def is_open(self) -> bool:
        """Whether it waits for answers."""
        return bool(self._questions())

    def take(self, answers: Iterable[ReplicaAnswer]) -> None:
        """Note the answers of a node."""
        for answer in answers:
            if answer.question.group != PLACEMENT or answer.question.rank not in self._ranks:
                continue
            if answer.question.ranges:
                self._boxes[answer.question.rank] = answer
            elif answer.question.rank not in self._entries:
                parts = answer.parts if len(answer.parts) % 12 == 0 else b""
                entries = self._entries[answer.question.rank] = np.frombuffer(parts, "<u4").reshape(-1, 3)
                if len(entries) < answer.count:
                    self._last = min(self._last, int(entries[-1, 0]) if len(entries) else -1)
                if len(self._entries) == len(self._ranks):
                    self._choose()

    def __str__(self) -> str:
        infos = {rank: answer.ranges[0].info for rank, answer in sorted(self._boxes.items()) if answer.ranges}
        names = {info.name for info in infos.values()}
        if len(names) != 1:
            whole = f"add up to the whole tensor {self._name!r}" if self._name else "add up to whole tensors"
            return f"the shards of all ranks do not {whole}: {_GAP}"
        whole, by_tensor = (
            f"the shards of all ranks do not add up to the whole tensor {names.pop()!r}",
            defaultdict[str, list[int]](list),
        )
        for rank, info in infos.items():
            by_tensor[info.dtype].append(rank)
        if len(by_tensor) > 1:
            sides = sorted(by_tensor.items(), key=lambda side: (len(side[1]), -side[1][0]))[:_LISTED]
            return f"{whole}: {'; '.join(f'for {ranks_text(ranks)} it is {what}' for what, ranks in sides)}"
        found = [(rank, (one.info.offset, one.info.extent)) for rank in infos for one in self._boxes[rank].ranges]
        return f"{whole}, {next(iter(by_tensor))}: {_overlap(found) or _listed(found)}"

    def _questions(self) -> list[ReplicaQuestion]:
        if len(self._entries) < len(self._ranks):
            return [ReplicaQuestion(rank, PLACEMENT) for rank in self._ranks if rank not in self._entries]
        numbers = self._numbers.items()
        return [ReplicaQuestion(rank, PLACEMENT, (number,)) for rank, number in numbers if rank not in self._boxes]

    def _choose(self) -> None:
        """Choose a tensor whose chunks do not count what the whole one does, or of which ranks have other shapes."""
        every = np.concatenate([*self._entries.values()]).astype(np.uint64)
        marks, places = np.unique(every[:, 0], return_inverse=True)
        covered, least, most = (np.full(len(marks), first, np.uint64) for first in (0, PRIME, 0))
        np.add.at(covered, places, every[:, 1])
        np.minimum.at(least, places, every[:, 2])
        np.maximum.at(most, places, every[:, 2])
        wrong = marks[(covered % np.uint64(PRIME) != most) | (least != most)]
        if len(wrong) and wrong[0] <= self._last:
            places_of = ((rank, np.flatnonzero(entries[:, 0] == wrong[0])) for rank, entries in self._entries.items())
            self._numbers = {rank: int(found[0]) for rank, found in places_of if len(found)}


def _overlap(boxes: _Boxes) -> str:
    """The first two ranks that store the same elements; "" if none do."""
    for i, (rank, box) in enumerate(boxes):
        for other, another in boxes[:i]:
            if len(box[0]) == len(another[0]) and (both := overlap(box, another)) is not None:
                return f"{ranks_text((other, rank))} both store {_slices(both)}"
    return ""


def _listed(boxes: _Boxes) -> str:
    texts = [f"{member_text(rank)} stores {_slices(box)}" for rank, box in boxes[:_LISTED]]
    more = f"; and {len(boxes) - _LISTED} more" if len(boxes) > _LISTED else ""
    return f"{'; '.join(texts)}{more}; no rank stores the others"


def _slices(box: Box) -> str:
    return f"[{', '.join(f'{low}:{low + size}' for low, size in zip(*box, strict=False))}]"
