"""Chooses the rule by which each shard of a save is rounded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from .chunk_info import HOST_CHUNK
from .chunks import cuts
from .lossy.profiles import Lossy
from .lossy.rules import Blockwise, MantissaBits, Rule
from .lossy.tensor_values import Numbers
from .shards import Shard

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class ShardRules:
    """The rules of one rank's shards, kept between saves."""

    def __init__(self, lossy: Lossy) -> None:
        self._lossy, self._warned = lossy, False
        self._streams: dict[int, torch.cuda.Stream] = {}

    def ask(self, shards: Iterable[Shard]) -> None:
        """Note what the user has specified for each shard."""
        for shard in shards:
            shard.selector = self._lossy.selector(shard.leaf.name, shard.dtype, shard.shape)
        idle = [] if self._warned else self._lossy.unmatched(shard.leaf.name for shard in shards)
        if idle and (not self._lossy.profile or len(idle) == len(self._lossy.rules)):
            logger.warning("Compression.lossy: this rank has no tensor of group %s", ", ".join(idle))
        self._warned = True

    def choose(self, shards: Sequence[Shard], ready: Mapping[int, torch.cuda.Event]) -> bool:
        """Choose the rule of each shard; whether any has changed. ``ready``: for each device an event, after which its tensors
        may be read."""
        before, rules = [shard.rule for shard in shards], [self._rule(shard, ready) for shard in shards]
        for shard, rule in zip(shards, rules, strict=True):
            shard.rule = rule
        return rules != before

    def _rule(self, shard: Shard, ready: Mapping[int, torch.cuda.Event]) -> Rule | None:
        """A tensor and its copy have the same numbers, so they get the same rule."""
        if shard.selector is None or isinstance(shard.selector, MantissaBits | Blockwise):
            return shard.selector
        with self._stream(shard.device, ready):
            return shard.selector.choose(lambda: _numbers(shard), shard.rule)

    def _stream(self, device: int | None, ready: Mapping[int, torch.cuda.Event]) -> torch.cuda.StreamContext | nullcontext[None]:
        """A context that waits only for the work that makes the tensors, not for other work queued on the device."""
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
    boxes = [cut.box for cut in cuts(shard, HOST_CHUNK) if cut.nbytes]  # small boxes take less memory of a device
    return Numbers(shard.leaf.name, shard.dtype, shard.bits, boxes, shard.offset[-1])
