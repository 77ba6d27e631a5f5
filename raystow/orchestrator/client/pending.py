"""A save in flight, as its caller sees it."""

from __future__ import annotations

from ...storage.errors import DeadlineExceeded, OutcomeUnknown, RaystowError
from ...storage.notebook import facts_table
from ...storage.versions.version import Version
from .save_outcome import SaveOutcome


class Pending:
    """A save in flight: first *staged* (the node worker has all of it), then *durable* (it is a version) or failed.

    Attributes:
        step: The step given to ``save``.
        number: How many saves this rank has begun, with this one.
        begun: When ``save`` was called, in monotonic seconds.
    """

    def __init__(self, outcome: SaveOutcome) -> None:
        self._outcome, self._progress = outcome, outcome.progress
        self.step, self.number, self.begun = self._progress.step, self._progress.number, self._progress.begun

    def __repr__(self) -> str:
        return f"Pending(step={self.step}, {self._state()})"

    def _repr_html_(self) -> str:
        error = self._outcome.value if isinstance(self._outcome.value, RaystowError) else ""
        facts = {"state": self._state(), "training waited": f"{self.stall:.3f} s", "error": error}
        return facts_table(f"save of step {self.step}", {**facts, "warnings": "; ".join(self.warnings)})

    def _state(self) -> str:
        if self._outcome.value is None:
            return "in flight, staged" if self._progress.staged.is_set() else "in flight"
        return {OutcomeUnknown: "outcome unknown", Version: "durable"}.get(type(self._outcome.value), "failed")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Problems with the state, and ranks that are late. Each is also logged, as soon as it is known."""
        return self._progress.warnings

    @property
    def stall(self) -> float:
        """Seconds that ``save`` and ``fence`` have blocked the caller for this save so far."""
        return self._progress.stall

    def done(self) -> bool:
        """Tell whether the save has ended.

        Returns:
            True once it is durable, has failed, or has ended with an unknown outcome.
        """
        return self._outcome.wait(0)

    def staged(self, timeout: float | None = None) -> bool:
        """Wait until the node worker has all that this rank saves: it completes the save even if this process is killed then.

        The tensors may change as well. ``fence`` returns earlier, when they have been read. A wait raises the priority of reading
        them over other work of the GPU.

        Args:
            timeout: Seconds to wait. None: no limit. 0 polls, without raising the priority.

        Returns:
            Whether the node worker has it. True for a save that has failed.
        """
        return self._progress.wait(self._progress.staged, timeout)

    def result(self, timeout: float | None = None) -> Version:
        """Wait for the version.

        If the outcome is unknown, each call asks the store and the coordinator again, for up to some seconds.

        Args:
            timeout: Seconds to wait. None: no limit.

        Returns:
            The committed version.

        Raises:
            SaveFailed: The save has failed. It is no version, and will not become one.
            OutcomeUnknown: The save has ended, and neither the store nor the coordinator can say yet whether it is a version.
            Fenced: Another run has taken over the repository.
            DeadlineExceeded: The save has not ended after ``timeout`` seconds.
        """
        if not self._outcome.wait(timeout):
            raise DeadlineExceeded(f"not durable after {timeout:g} s", subject=self._progress.subject)
        found = self._outcome.find_again()
        if isinstance(found, Version):
            return found
        raise found
