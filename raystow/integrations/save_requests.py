"""Saves that a trainer's callback makes at once: since a node will be removed, or since somebody asks for one."""

from __future__ import annotations

import torch
from torch import distributed

from ..orchestrator.client.checkpointer import Checkpointer
from ..orchestrator.client.options import Interval

_NEVER = Interval(steps=(1 << 63) - 1)
"""No step is due by its number: the callback counts itself."""


def of_any_rank(own: bool, device: torch.device) -> bool:
    """Whether it is so on any rank of the default process group; alone, on this one."""
    if not distributed.is_available() or not distributed.is_initialized():
        return own
    found = torch.tensor(int(own), device=device)
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return bool(found)


class SaveRequests:
    """Lets all ranks save the same steps at once. ``counts``: whether the callback has an interval of its own; else steps are due
    at that of the ``checkpointer``, too."""

    def __init__(self, checkpointer: Checkpointer, *, counts: bool) -> None:
        self._checkpointer, self._interval, self._asked = checkpointer, _NEVER if counts else None, False

    def ask(self) -> None:
        """Ask for a save, on any rank. May be called from a signal handler or another thread."""
        self._asked = True
        self._checkpointer.save_now()

    def due(self, step: int, device: torch.device, *, last: bool = False) -> bool:
        """Tell whether to save this step at once.

        Args:
            step: The number of optimizer steps so far; call it after each, on all ranks.
            device: Of the model: the backend of the ranks can exchange its tensors.
            last: Whether no step follows, for which the coordinator could choose to meet a request.
        """
        due = self._checkpointer.due(step, self._interval)
        if last:
            due = of_any_rank(due or self._asked, device)
        self._asked = self._asked and not due
        return due
