"""The saves that failed on a rank, so that no attempt waits for it until its deadline."""

from __future__ import annotations

from .attempt import Attempt

_STEPS = 16  # steps of which failed saves are remembered


class MissedSaves:
    """The failed saves of the newest steps."""

    def __init__(self) -> None:
        self._missed: dict[int, dict[int, tuple[int, str]]] = {}  # step -> rank -> number of its failed save, and the reason

    def note(self, rank: int, save: int, step: int, reason: str) -> bool:
        """Note that the ``save``-th save of a rank has failed. Returns whether this rank is the first to report that save."""
        reports = self._missed.setdefault(step, {})
        if reports.get(rank, (0, ""))[0] != save:
            reports.pop(rank, None)  # reports have the order in which they came
            reports[rank] = save, reason
        if len(self._missed) > _STEPS:
            del self._missed[next(iter(self._missed))]
        return next(other for other, (number, _) in reports.items() if number == save) == rank

    def forget(self, rank: int) -> None:
        """Forget the failed saves of a rank whose process was replaced."""
        for reports in self._missed.values():
            reports.pop(rank, None)

    def reason(self, attempt: Attempt) -> str | None:
        """Why an attempt waits in vain for a rank, if it does. A retry has a higher number: all ranks count their saves alike."""
        for rank, (save, reason) in self._missed.get(attempt.step, {}).items():
            if rank < attempt.world_size and rank not in attempt.ranks and attempt.first_save <= save:
                return reason
        return None
