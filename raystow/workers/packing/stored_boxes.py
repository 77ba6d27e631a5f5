"""What the ranks of a node store of each tensor in one attempt: asked for if the shards of all ranks are no whole tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from ...state.chunk_info import RangeInfo
from ...state.coverage import counted, coverage, mark, total
from ...storage.format.boxes import Box
from ...storage.format.manifest import Chunk
from ..protocol.messages import DescribedRange, ReplicaAnswer, ReplicaQuestion

_TENSORS = 4000  # in one answer, which takes 48 KB
_BOXES = 64  # in one answer


class StoredBoxes:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._chunks = defaultdict[int, list[Chunk]](list)

    def add(self, rank: int, chunks: Iterable[Chunk]) -> None:
        """Add chunks that a rank stores."""
        self._chunks[rank] += chunks

    def answer(self, question: ReplicaQuestion) -> ReplicaAnswer:
        """The answer to a question of the group ``PLACEMENT``."""
        by_name = defaultdict[str, list[Chunk]](list)
        for chunk in self._chunks[question.rank]:
            by_name[chunk.name].append(chunk)
        names = sorted(by_name, key=mark)[:_TENSORS]
        if not question.ranges:
            entries = np.array([(mark(name), *_counts(by_name[name])) for name in names], "<u4")
            return ReplicaAnswer(question, len(by_name), entries.tobytes())
        found = list[DescribedRange]()
        for number in question.ranges:
            for name in names[number : number + 1] if number >= 0 else ():
                what = f"{by_name[name][0].dtype} {list(by_name[name][0].shape)}"
                boxes = (RangeInfo(name, what, *box, question.rank) for box in _merged(by_name[name]))
                found += (DescribedRange(number, info, 0, 0) for info in boxes)
        return ReplicaAnswer(question, len(by_name), ranges=tuple(found[:_BOXES]))


def _counts(chunks: Sequence[Chunk]) -> tuple[int, int]:
    """What the chunks of a tensor count, and what all of it does."""
    terms = (coverage(one.name, one.dtype, one.shape, one.box) for one in chunks)
    return counted(total(terms)), counted(coverage(chunks[0].name, chunks[0].dtype, chunks[0].shape))


def _merged(chunks: Sequence[Chunk]) -> list[Box]:
    """The boxes of chunks; neighbours that are cut along one axis are one."""
    found = list[Box]()
    for offset, extent in sorted((tuple(one.offset), tuple(one.extent)) for one in chunks):
        if found:
            low, size = found[-1]
            axes = [i for i, at in enumerate(offset) if (low[i], size[i]) != (at, extent[i])]
            if len(axes) == 1 and low[axes[0]] + size[axes[0]] == offset[axes[0]]:
                axis = axes[0]
                found[-1] = low, (*size[:axis], size[axis] + extent[axis], *size[axis + 1 :])
                continue
        found.append((offset, extent))
    return found
