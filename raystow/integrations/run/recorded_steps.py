"""The journal of a run: it records all that the run knows."""

from __future__ import annotations

from collections.abc import Callable

from ...orchestrator.client.checkpointer import Checkpointer
from .members import Members


class RecordedSteps:
    """Records each step of a run, with the values of all its objects besides models and optimizers.

    Args:
        after_step: What changes the state between the optimizers' steps and the end of a step.
        durable_every: See ``Checkpointer.journal``.
    """

    def __init__(
        self, checkpointer: Checkpointer, members: Members, after_step: Callable[[], None] | None, *, durable_every: int
    ) -> None:
        self._checkpointer, self._members, self._after_step = checkpointer, members, after_step
        self._journal = checkpointer.journal(members.model, *members.optimizers, durable_every=durable_every)
        self._advised = False

    def replay(self, step: int) -> int:
        """Replay the steps after ``step``, and return the newest one."""
        recorded = self._journal.replay(self._after_step, fixed=self._members.own)
        if recorded is None:
            return step
        self._members.load(recorded)
        newest: int = recorded["step"]
        return newest

    def record(self, step: int) -> None:
        """Record a step. If steps are not being recorded until the next save, let all ranks save soon."""
        self._journal.record(step, {"step": step, **self._members.values()})
        if self._journal.save_advised and not self._advised:
            self._checkpointer.save_now()
        self._advised = self._journal.save_advised
