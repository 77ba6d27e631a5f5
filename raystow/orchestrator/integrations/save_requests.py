"""Saves that a trainer's callback makes at once: since a node will be removed, or since somebody asks for one."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch
from torch import distributed

from ...storage.clock import SYSTEM, Clock
from ...storage.errors import Unsupported

logger = logging.getLogger(__name__)

_INTERVAL = 1.0
"""Seconds between two looks, which exchange two numbers between all ranks."""
_MOST = 100  # steps


def of_all_ranks(own: torch.Tensor) -> torch.Tensor:
    """The tensors of all ranks of the default process group, one after the other; alone, that of this process."""
    if not distributed.is_available() or not distributed.is_initialized():
        return own
    found = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(found, own)
    return torch.cat(found)


class SaveRequests:
    """Lets all ranks decide alike, and at the same step.

    Args:
        preempted: Tells whether a node will be removed, once for each notice, on all ranks alike; None if nobody tells.
        clock: Measures the steps.
        gather: Returns the tensors of all ranks, one after the other.
    """

    def __init__(
        self,
        preempted: Callable[[], bool] | None,
        clock: Clock = SYSTEM,
        *,
        gather: Callable[[torch.Tensor], torch.Tensor] = of_all_ranks,
    ) -> None:
        self._preempted, self._clock, self._gather, self._asked = preempted, clock, gather, False
        self._next, self._before = 0, (0, clock.monotonic())

    def ask(self) -> None:
        """Ask for a save, on any rank. May be called from a signal handler or another thread."""
        self._asked = True

    def due(self, step: int, device: torch.device, *, last: bool = False) -> bool:
        """Tell whether to save this step at once.

        Args:
            step: The number of optimizer steps so far; call it after each, on all ranks.
            device: Of the model: the backend of the ranks can exchange its tensors.
            last: Whether no step follows, so that a request must not wait for the next look.
        """
        if not last and self._before[0] <= step < self._next:
            return False
        if asked := self._asked:
            self._asked = False  # a request between the two lines is met by the save that follows
        before, now = self._before, self._clock.monotonic()
        self._before = step, now
        # At the first look, or after the training went back, the time of a step is not known.
        taken = (now - before[1]) / (step - before[0]) if 0 < before[0] < step else _INTERVAL
        steps = min(_MOST, max(1, math.floor(_INTERVAL / max(taken, 1e-9))))
        noticed = self._noticed()
        save, most = self._gather(torch.tensor([[int(asked or noticed), steps]], device=device)).amax(0).tolist()
        self._next = step + most
        return bool(save)

    def _noticed(self) -> bool:
        try:
            return self._preempted is not None and self._preempted()
        except Unsupported as error:  # on all ranks: the training goes on as before
            logger.warning("nothing is saved when a node will be removed: %s", error)
            self._preempted = None
            return False
