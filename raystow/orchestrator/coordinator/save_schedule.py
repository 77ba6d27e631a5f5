"""The steps at which a run saves by time, by request of a rank, or since the node of a rank will be removed. They are chosen
ahead, so that every rank gets the same answer without waiting for another.

A rank asks for the next step at which it must do something: save, or ask again. The first rank that asks decides for all; the
others get the same answer. A decision looks ahead by at most half of the time that is left, and by no more steps than were
observed, so a save is due within about a step of its time although steps take different times. It looks ahead by about a second,
so that a notice or request is met soon.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set

from ...storage.runtime.clock import Clock
from ...workers.protocol.messages import AskNextSave, NextSave

_KEPT = 16  # decisions; ranks are apart by one or two
_OBSERVED = 4  # questions from which the time of a step is computed
_AHEAD = 1.0  # seconds
_EACH = 0.002  # seconds for each rank, so that thousands of ranks ask 500 questions a second


class SaveSchedule:
    """Not thread-safe. ``leaving``: the nodes that will be removed, as Ray says."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._decisions: deque[tuple[int, NextSave]] = deque(maxlen=_KEPT)  # with the step from which it was asked
        self._asked: deque[tuple[int, float]] = deque(maxlen=_OBSERVED)  # step and time of the first question of each
        self._since = 0.0  # when the newest save was due, or the first question came
        self.leaving: Set[str] = frozenset()
        self._nodes: dict[int, str] = {}  # of the ranks that have asked
        self._left: set[str] = set()  # the nodes for whose removal a save was due
        self._requested = False

    @property
    def in_use(self) -> bool:
        """Whether a rank has asked."""
        return bool(self._nodes)

    def next(self, ask: AskNextSave, interval: float) -> NextSave:
        """The decision for the steps from ``ask.first`` on, with ``interval`` seconds from save to save."""
        first, self._nodes[ask.rank] = ask.first, ask.node
        if self._decisions and first < self._decisions[0][0]:  # the training went back by more than is remembered
            self._decisions.clear()
            self._asked.clear()
        known = next((decision for _, decision in self._decisions if first <= decision.step), None)
        self._requested |= ask.requested and not (known is not None and known.save)
        if known is not None:
            return known
        now = self._clock.monotonic()
        if not self._decisions or self._decisions[-1][1].save:
            self._since = now
        self._asked.append((first, now))
        if self._at_once(ask.world_size):
            decision = NextSave(first, save=True)
        else:
            decision = self._decide(first, self._since + interval - now, max(_AHEAD, _EACH * ask.world_size))
        self._decisions.append((first, decision))
        return decision

    def _at_once(self, ranks: int) -> bool:
        """Whether a save was requested, or a node will be removed for which none was due yet."""
        leaving = self.leaving & {node for rank, node in self._nodes.items() if rank < ranks} - self._left
        at_once, self._requested = self._requested or bool(leaving), False
        self._left |= leaving
        return at_once

    def _decide(self, first: int, left: float, ahead: float) -> NextSave:
        (step, at), (_, now) = self._asked[0], self._asked[-1]
        observed = first - step
        per_step = (now - at) / observed if observed else 0.0
        if left <= 1.5 * per_step:
            return NextSave(first, save=True)
        steps = min(left / 2, ahead) / per_step if per_step else 0.0
        return NextSave(first + max(1, int(min(steps, observed))) - 1, save=False)
