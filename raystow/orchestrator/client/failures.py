"""Counts the failed saves of a rank and decides which of them raise in the training process."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ...storage.arguments import integer
from ...storage.errors import Fenced, OutcomeUnknown, RaystowError, SaveFailed
from ..argument_checks import one_of


class Failures:
    """The failed saves of one rank.

    Attributes:
        total: Failed saves since the ``Checkpointer`` was made, including those whose outcome is unknown.
        in_a_row: Those since the last save that became durable.
    """

    def __init__(self, on_failure: str | int, *, count: Callable[[], None]) -> None:
        """``on_failure``: see ``Checkpointer``. ``count`` is called for each failure."""
        if isinstance(on_failure, str):
            one_of("on_failure", on_failure, ("raise", "warn"))
        else:
            integer("on_failure", on_failure, least=1, instead='"raise" or "warn"')
        self.total = self.in_a_row = 0
        self._on_failure, self._count = on_failure, count
        self._unraised: list[RaystowError] = []
        self._last: tuple[int, RaystowError] | None = None  # the step and the failure of the newest save, unless it was raised
        self._fenced: Fenced | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Failures(total={self.total}, in_a_row={self.in_a_row})"

    def succeeded(self) -> None:
        """Note that a save is durable. With "raise", an earlier failure that was not raised yet is still raised."""
        with self._lock:
            self.in_a_row, self._last = 0, None
            if self._on_failure != "raise":
                self._unraised.clear()

    def found_durable(self, error: RaystowError) -> None:
        """Note that a save whose unknown outcome ``failed`` counted as ``error`` is a version."""
        with self._lock:
            self.total -= 1
            self.in_a_row = max(0, self.in_a_row - 1)
            self._unraised = [other for other in self._unraised if other is not error]
            if self._last is not None and self._last[1] is error:
                self._last = None

    def fenced(self, error: Fenced) -> None:
        """Note that a save whose unknown outcome ``failed`` counted has ended because of another run."""
        with self._lock:
            self._fenced = error

    def failed(self, step: int, error: RaystowError) -> str:
        """Note that a save has failed, or has ended with an unknown outcome. Returns what to log."""
        with self._lock:
            if isinstance(error, Fenced):
                self._fenced = error
            self.total += 1
            self.in_a_row += 1
            total, in_a_row = self.total, self.in_a_row
            reported = isinstance(error, SaveFailed | OutcomeUnknown)
            self._last = step, error if reported else SaveFailed(str(error), subject=f"save of step {step}")
            self._unraised.append(self._last[1])
        self._count()
        ended = "has an unknown outcome" if isinstance(error, OutcomeUnknown) else "failed"
        return f"the save of step {step} {ended} ({in_a_row} in a row, {total} in total): {error}"

    @property
    def raises(self) -> bool:
        """Whether ``on_failure`` asks to raise."""
        return self._on_failure != "warn"

    def check(self) -> None:
        """Raise ``SaveFailed`` or ``OutcomeUnknown`` once if ``on_failure`` asks for it, and ``Fenced`` from then on always."""
        with self._lock:
            unraised, self._unraised = self._unraised, []
            if self._fenced is not None:
                self._last = None
                raise self._fenced
            in_a_row = self.in_a_row
            if not unraised or self._on_failure == "warn" or (self._on_failure != "raise" and in_a_row < int(self._on_failure)):
                return
            self._last = None
        if self._on_failure == "raise":
            raise unraised[0]
        remedy = 'remove the cause, or pass on_failure="warn" to train on without checkpoints'
        raise SaveFailed(f"{in_a_row} saves in a row have failed, the last one: {unraised[-1]}", remedy=remedy)

    def check_last(self) -> None:
        """Raise at the end of a training: as ``check``, and whatever number ``on_failure`` is, if the newest save failed. Raises
        nothing because of failures that were raised before."""
        if self._unraised:
            self.check()
        with self._lock:
            last, self._last = self._last, None
        if last is not None and self._on_failure != "warn":
            step, error = last
            what = f"the last save, of step {step}, failed: {error.what}"
            raise type(error)(what, subject=error.subject, remedy=error.remedy)
