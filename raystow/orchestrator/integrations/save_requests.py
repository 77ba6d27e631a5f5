"""Saves that a trainer's callback makes at once: since a node will be removed, or since somebody asks for one."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ...storage.clock import SYSTEM, Clock

_INTERVAL = 1.0
"""Seconds between two looks, which exchange two numbers between all ranks."""
_MOST = 100  # steps


class SaveRequests:
    """Lets all ranks decide alike, and at the same step.

    Args:
        preempted: Tells whether a node will be removed, once for each notice, on all ranks alike; None if nobody tells.
        clock: Measures the steps.
    """

    def __init__(self, preempted: Callable[[], bool] | None, clock: Clock = SYSTEM) -> None:
        self._preempted, self._clock, self._asked = preempted, clock, False
        self._next, self._before = 0, (0, clock.monotonic())

    def ask(self) -> None:
        """Ask for a save, on any rank. May be called from a signal handler or another thread."""
        self._asked = True

    def due(self, step: int, gathered: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Tell whether to save this step at once.

        Args:
            step: The number of optimizer steps so far; call it after each, on all ranks.
            gathered: Returns the tensors of all ranks, concatenated in any shape.
        """
        if self._before[0] <= step < self._next:
            return False
        asked, self._asked = self._asked, False
        before, now = self._before, self._clock.monotonic()
        self._before = step, now
        # At the first look, or after the training went back, the time of a step is not known.
        taken = (now - before[1]) / (step - before[0]) if 0 < before[0] < step else _INTERVAL
        steps = min(_MOST, max(1, math.floor(_INTERVAL / max(taken, 1e-9))))
        noticed = self._preempted is not None and self._preempted()
        save, most = gathered(torch.tensor([[int(asked or noticed), steps]])).reshape(-1, 2).amax(0).tolist()
        self._next = step + most
        return bool(save)
