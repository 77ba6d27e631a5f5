"""A node is going to be taken away: training is told, so that it saves, and that save is waited for. Knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..storage.clock import Clock
from ..storage.errors import DeadlineExceeded
from ..workers.progress import Saves

_LOOK = 0.5  # seconds between two looks at how far the saves are
_FIRST = 30.0  # seconds in which a rank that has not saved since it was started begins to save


@dataclass(frozen=True)
class Drained:
    """What became of a notice. ``durable``: the repositories that have a version which was begun after it; ``left``: those whose
    ranks went away before; both by URI."""

    durable: tuple[str, ...]
    left: tuple[str, ...]


def drain(
    saves: Callable[[], Mapping[str, Saves] | None], announce: Callable[[], None], clock: Clock, *, seconds: float
) -> Drained:
    """Announce the end of a node, and return when what its ranks work on is in versions that were begun after that.

    ``saves``: see ``Node.saves``; None where there is no node worker, so that nobody can save. A rank that has not saved yet is
    not connected to it: where none is, one has 30 s to begin. Raises ``DeadlineExceeded`` after ``seconds``, and what ``saves``
    and ``announce`` raise.
    """
    before = saves()  # first: what begins from here on is as good as a save on notice
    start = clock.monotonic()
    announce()
    if before is None:
        return Drained((), ())
    seen, durable = {*before}, set[str]()
    while True:
        now = saves() or {}
        seen |= {*now}
        durable |= {uri for uri, state in now.items() if state.durable > _told(before.get(uri, Saves()), state)}
        waiting, waited = {*now} - durable, clock.monotonic() - start
        if not waiting and (seen or waited >= min(_FIRST, seconds)):
            return Drained(tuple(sorted(durable)), tuple(sorted(seen - durable)))
        if waited >= seconds:
            raise DeadlineExceeded(
                f"no version that was begun after the notice within {seconds:.0f} s",
                subject=", ".join(sorted(waiting)),
                remedy="let the training ask ray.train.get_preemption_info(), and save; what it has saved before is not lost",
            )
        clock.sleep(_LOOK)


def _told(before: Saves, now: Saves) -> int:
    """The number up to which saves were begun before the notice; none if a new node worker has begun to count."""
    return before.begun if now.begun >= before.begun else 0
