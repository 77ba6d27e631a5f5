"""Finds the tensors of a state that may follow from others: weights that are their master copy rounded, copies, tied embeddings.

A look at some elements of each tensor says which; whether all elements follow is told chunk by chunk in every save.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..storage.coding.derived import derivable, derive
from .shards import Shard

_SAMPLE = 64  # elements

Ready = Mapping[int, Any]


class Relations:
    """What one rank has found. It looks in its first, second, fourth, eighth save and so on, and where the state has other
    tensors than before: in the same saves as all ranks, so that those who hold the same tensors find the same.

    A look takes the staging thread some milliseconds, in which nothing is read, and somebody may be waiting for that. So only
    the first save waits for it, and one with other tensors; the others look when there is time, for those that come.
    """

    def __init__(self) -> None:
        self._looked = 0  # in which save
        self._found: dict[int, int] = {}
        self._known: Sequence[Any] = ()

    def of(self, known: Sequence[Any], shards: Callable[[], Sequence[Shard]], ready: Ready, *, save: int) -> dict[int, int]:
        """Numbers of shards, each with that of the shard from which it seems to follow. ``known``: the ``likeness`` of all.
        ``ready``: for each device an event, after which its tensors may be read. ``save``: its number, from 1 on. Off the
        training thread."""
        if known != self._known or self._is_due(save - 1):
            self._looked, self._found, self._known = save, _find(shards(), ready), known
        return self._found

    def look_again(self, shards: Sequence[Shard], ready: Ready, *, save: int) -> None:
        """For the saves to come, if this is one in which to look: at the shards of ``of``, before the tensors may change."""
        if self._is_due(save):
            found = _find(shards, ready)
            self._looked, self._found = save, self._found if found == self._found else found  # what hangs on it is kept

    def _is_due(self, save: int) -> bool:
        return self._looked.bit_length() < save.bit_length()

    def forget(self, shard: Shard) -> None:
        """It does not follow."""
        self._found = {i: source for i, source in self._found.items() if self._known[i][0] != shard.leaf.name}


def _find(shards: Sequence[Shard], ready: Ready) -> dict[int, int]:
    for event in ready.values():
        event.synchronize()
    alike: dict[Any, list[int]] = defaultdict(list)
    for i, shard in enumerate(shards):
        if shard.may_follow:
            alike[shard.shape, shard.offset, shard.extent, shard.holders, shard.device].append(i)
    found: dict[int, int] = {}
    for numbers in alike.values():
        samples = _samples([shards[i] for i in numbers]) if len(numbers) > 1 else []
        sources: dict[tuple[str, bytes], int] = {}
        dtypes = {shards[i].dtype for i in numbers}
        for i, sample in sorted(zip(numbers, samples, strict=False), key=lambda pair: (-shards[pair[0]].itemsize, pair[0])):
            if (source := sources.get((shards[i].dtype, sample.tobytes()))) is not None:
                found[i] = source
            elif (sample.reshape(_SAMPLE, -1) != sample[: len(sample) // _SAMPLE]).any():  # else it is like others by chance
                for dtype in dtypes:
                    if derivable(shards[i].dtype, dtype):
                        sources.setdefault((dtype, derive(sample, shards[i].dtype, dtype).tobytes()), i)
    return found


def _samples(shards: Sequence[Shard]) -> list[Any]:
    """Some elements of each of these, which are of one shape and lie on one device, evenly spread, as bytes (uint8)."""
    flat = [shard.bits.reshape(-1) for shard in shards]
    at = [np.linspace(0, len(words) - 1, _SAMPLE).astype(np.int64) for words in flat]
    if shards[0].device is None:
        return [words[some].view(np.uint8) for words, some in zip(flat, at, strict=True)]
    import torch

    with torch.cuda.stream(torch.cuda.Stream(flat[0].device)):  # whatever the training has queued up is not waited for
        index = torch.from_numpy(at[0]).to(flat[0].device)
        picked = torch.cat([words[index].view(torch.uint8) for words in flat]).cpu().numpy()
    ends = np.cumsum([shard.itemsize * _SAMPLE for shard in shards])
    return np.split(picked, ends[:-1])
