"""Gradients that a training accumulates from one step of a run to the next: no version has them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ...orchestrator.journal.tracked_state import local
from ...state.optimizers import parameters_of, unwrapped_optimizer

logger = logging.getLogger(__name__)


class PendingGradients:
    """Says once that a step has ended with gradients that no optimizer has used.

    Gradients from before the last optimizer step are used. Those of a step that a ``GradScaler`` skips are not finite.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = [unwrapped_optimizer(one) for one in optimizers]
        self._stepped = self._said = False
        self._used: tuple[int, int] | None = None
        self._handles = [one.register_step_post_hook(self._note_step) for one in self._optimizers]

    def begin(self) -> None:
        """Note that a step begins."""
        self._stepped = False

    def end(self, step: int) -> None:
        """Warn if a step, which is saved or recorded now, ends with gradients that are not used."""
        if self._stepped or self._said or self._sample() in (None, self._used):
            return
        gradients = self._gradients()
        if all(bool(torch.isfinite(local(gradient)).all()) for gradient in gradients if not gradient.is_sparse):
            self._said = True
            what = (
                "step %d has ended with gradients that no optimizer step has used: they are not saved, and a restart loses them"
            )
            logger.warning(f"{what}; let each step of steps() end with an optimizer step", step, extra={"step": step})

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _note_step(self, *_: object) -> None:
        self._stepped, self._used = True, self._sample()

    def _gradients(self) -> list[torch.Tensor]:
        return [one.grad for optimizer in self._optimizers for one in parameters_of(optimizer) if one.grad is not None]

    def _sample(self) -> tuple[int, int] | None:
        """Tells whether the first gradient is the same as before."""
        found = (one.grad for optimizer in self._optimizers for one in parameters_of(optimizer) if one.grad is not None)
        first = next(found, None)
        return None if first is None else (id(first), local(first)._version)
