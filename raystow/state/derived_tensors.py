"""Finds tensors of a state that can be derived from others: weights that are their rounded master copy, copies, tied embeddings.

A sample of each tensor says which may be derived. Whether all elements are is checked for each chunk in every save. Of tensors
that several ranks hold, those of all ranks that are in the same memory are derived, and no others: all holders must agree which
of them are stored, and whether two tensors have equal bits can differ between ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ..storage.coding.derived import derivable, derive
from ..storage.coding.kernels import Bytes
from .shards import Likeness, Shard

if TYPE_CHECKING:
    import torch

_SAMPLE = 64  # elements

Ready: TypeAlias = "Mapping[int, torch.cuda.Event]"
"""For each device an event, after which its tensors may be read."""


class DerivedTensors:
    """What one rank has found. It samples in its first, second, fourth, eighth save and so on, and if the state has other
    tensors than before: in the same saves as all ranks, so that they find the same tensors of all ranks.

    Sampling takes some milliseconds of the staging thread, in which nothing is staged. So only a save with other tensors, such as
    the first, waits for it; the others sample after staging, for later saves.
    """

    def __init__(self) -> None:
        self._sampled = 0  # number of the save of the last sample
        self._found: dict[int, int] = {}
        self._known: Sequence[Likeness] = ()

    def of(
        self, known: Sequence[Likeness], shards: Callable[[], Sequence[Shard]], ready: Ready, *, save: int, world_size: int
    ) -> dict[int, int]:
        """Numbers of shards, each with the number of the shard that it seems to be derived from. ``known``: the ``likeness`` of
        all. ``save``: its number, from 1. Not on the training thread."""
        if known != self._known or self._is_due(save - 1):
            self._sampled, self._found, self._known = save, _find(shards(), ready, world_size), known
        return self._found

    def refresh(self, shards: Sequence[Shard], ready: Ready, *, save: int, world_size: int) -> None:
        """Sample for later saves if this save is one to sample in: the shards of ``of``, before the tensors may change."""
        if self._is_due(save):
            found = _find(shards, ready, world_size)
            self._sampled, self._found = save, self._found if found == self._found else found  # the same object, if equal

    def _is_due(self, save: int) -> bool:
        return self._sampled.bit_length() < save.bit_length()

    def forget(self, shard: Shard) -> None:
        self._found = {i: source for i, source in self._found.items() if self._known[i][0] != shard.leaf.name}


def _find(shards: Sequence[Shard], ready: Ready, world_size: int) -> dict[int, int]:
    for event in ready.values():
        event.synchronize()
    alike: dict[object, list[int]] = defaultdict(list)
    in_memory: dict[object, int] = {}
    found: dict[int, int] = {}
    for i, shard in enumerate(shards):
        if shard.derivable and len(shard.holders or range(world_size)) == 1:
            alike[shard.shape, shard.offset, shard.extent, shard.device].append(i)
        elif shard.derivable and not shard.holders:
            first = in_memory.setdefault((shard.address, shard.device, shard.shape, shard.dtype), i)
            if first != i:
                found[i] = first
    for numbers in alike.values():
        samples = _samples([shards[i] for i in numbers]) if len(numbers) > 1 else []
        sources: dict[tuple[str, bytes], int] = {}
        dtypes = {shards[i].dtype for i in numbers}
        for i, sample in sorted(zip(numbers, samples, strict=False), key=lambda pair: (-shards[pair[0]].itemsize, pair[0])):
            if (source := sources.get((shards[i].dtype, sample.tobytes()))) is not None:
                found[i] = source
            elif (sample.reshape(_SAMPLE, -1) != sample[: len(sample) // _SAMPLE]).any():  # constant samples match by chance
                for dtype in dtypes:
                    if derivable(shards[i].dtype, dtype):
                        sources.setdefault((dtype, derive(sample, shards[i].dtype, dtype).tobytes()), i)
    return found


def _samples(shards: Sequence[Shard]) -> list[Bytes]:
    """Evenly spread elements of shards of one shape and device, as bytes (uint8)."""
    flat = [shard.bits.reshape(-1) for shard in shards]
    at = np.linspace(0, len(flat[0]) - 1, _SAMPLE).astype(np.int64)
    if shards[0].device is None:
        return [words[at].view(np.uint8) for words in flat]
    import torch

    with torch.cuda.stream(torch.cuda.Stream(flat[0].device)):  # does not wait for work that the training has queued
        index = torch.from_numpy(at).to(flat[0].device)
        picked = torch.cat([words[index].view(torch.uint8) for words in flat]).cpu().numpy()
    ends = np.cumsum([shard.itemsize * _SAMPLE for shard in shards])
    return np.split(picked, ends[:-1])
