"""By which rule each shard of a save is rounded: as it is asked for, or as its numbers say."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from ..workers.ipc.ring import SLOT
from .cutting import cuts
from .lossy.choice import Lossy
from .lossy.numbers import Numbers
from .lossy.rules import Blockwise, MantissaBits, Rule
from .shards import Shard

logger = logging.getLogger(__name__)


class Choices:
    """Those of one rank, from save to save."""

    def __init__(self, lossy: Lossy) -> None:
        self._lossy, self._warned = lossy, False
        self._streams: dict[int, Any] = {}

    def ask(self, shards: Iterable[Shard]) -> None:
        """What is asked for each of these."""
        for shard in shards:
            shard.asked = self._lossy.asked(shard.leaf.name, shard.dtype, shard.shape)
        idle = [] if self._warned else self._lossy.idle(shard.leaf.name for shard in shards)
        if idle and (not self._lossy.profile or len(idle) == len(self._lossy.rules)):
            logger.warning("lossy=: no tensor of this rank belongs to %s: nothing is rounded for that", ", ".join(idle))
        self._warned = True

    def choose(self, shards: Sequence[Shard], ready: Mapping[int, Any]) -> bool:
        """The rule of each, and whether any is another than before. ``ready``: for each device an event, after which its tensors
        may be read."""
        before, rules = [shard.rule for shard in shards], [self._rule(shard, ready) for shard in shards]
        for shard, rule in zip(shards, rules, strict=True):
            shard.rule = rule
        return rules != before

    def _rule(self, shard: Shard, ready: Mapping[int, Any]) -> Rule | None:
        """A copy and what it is a copy of have the same numbers, and so the same rule."""
        if shard.asked is None or isinstance(shard.asked, MantissaBits | Blockwise):
            return shard.asked
        with self._beside(shard.device, ready):
            return shard.asked.choose(functools.partial(_numbers, shard), shard.rule)

    def _beside(self, device: int | None, ready: Mapping[int, Any]) -> Any:
        """Where what the training has queued up on a device is not waited for, only what makes the tensors."""
        if device is None:
            for event in ready.values():
                event.synchronize()
            return nullcontext()
        import torch

        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self._streams[device].wait_event(ready[device])
        return torch.cuda.stream(self._streams[device])


def _numbers(shard: Shard) -> Numbers:
    boxes = [cut.box for cut in cuts(shard, SLOT) if cut.nbytes]  # on a device as well: small ones take less of its memory
    return Numbers(shard.leaf.name, shard.dtype, shard.bits, boxes, shard.offset[-1])
