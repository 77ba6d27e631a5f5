"""The steps at which a run saves by time, chosen ahead, so that every rank gets the same answer without waiting for another.

A rank asks for the next step at which it must do something: save, or ask again. The first rank that asks decides for all; the
others are told the same. A decision looks ahead by at most half of the time that is left, and by no more steps than were
observed, so a save is due within about a step of its time although steps take different times.
"""

from __future__ import annotations

from collections import deque

from ...storage.clock import Clock
from ...workers.protocol.messages import NextSave

_KEPT = 16  # decisions; ranks are apart by one or two
_OBSERVED = 4  # questions from which the time of a step is computed


class SaveSchedule:
    """Not thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._decisions: deque[tuple[int, NextSave]] = deque(maxlen=_KEPT)  # with the step from which it was asked
        self._asked: deque[tuple[int, float]] = deque(maxlen=_OBSERVED)  # step and time of the first question of each
        self._since = 0.0  # when the newest save was due, or the first question came

    def next(self, first: int, interval: float) -> NextSave:
        """The decision for the steps from ``first`` on, with ``interval`` seconds from save to save."""
        if self._decisions and first < self._decisions[0][0]:  # the training went back by more than is remembered
            self._decisions.clear()
            self._asked.clear()
        known = next((decision for _, decision in self._decisions if first <= decision.step), None)
        if known is not None:
            return known
        now = self._clock.monotonic()
        if not self._decisions or self._decisions[-1][1].save:
            self._since = now
        self._asked.append((first, now))
        decision = self._decide(first, self._since + interval - now)
        self._decisions.append((first, decision))
        return decision

    def _decide(self, first: int, left: float) -> NextSave:
        (step, at), (_, now) = self._asked[0], self._asked[-1]
        observed = first - step
        per_step = (now - at) / observed if observed else 0.0
        if left <= 1.5 * per_step:
            return NextSave(first, save=True)
        half = left / per_step / 2 if per_step else 0.0
        return NextSave(first + max(1, int(min(half, observed))) - 1, save=False)
