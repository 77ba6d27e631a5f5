"""Announces the end of a node to the training and waits for the save that follows. Independent of Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...storage.errors import DeadlineExceeded
from ...storage.runtime.clock import Clock
from ...workers.protocol.messages import Saves

_LOOK = 0.5  # seconds between two polls of the saves
_FIRST = 30.0  # seconds for a first save to start


@dataclass(frozen=True)
class Drained:
    """The outcome of a notice. ``durable``: repositories with a version that was started after it; ``left``: those whose ranks
    disconnected before; both by URI."""

    durable: tuple[str, ...]
    left: tuple[str, ...]


def drain(
    saves: Callable[[], Mapping[str, Saves] | None], announce: Callable[[], None], clock: Clock, *, seconds: float
) -> Drained:
    """Announce the end of a node, and return when its ranks have versions that were started after that.

    ``saves``: see ``Node.saves``; None without a node worker, so that no rank can save. A rank connects with its first save: if
    none is connected, one has 30 s to start a save. Raises ``DeadlineExceeded`` after ``seconds``.
    """
    before = saves()  # before the announcement: a save started from here on counts
    start = clock.monotonic()
    announce()
    if before is None:
        return Drained((), ())
    seen, durable = {*before}, set[str]()
    while True:
        now = saves() or {}
        seen |= {*now}
        durable |= {uri for uri, state in now.items() if state.durable > _started_before(before.get(uri, Saves()), state)}
        waiting, waited = {*now} - durable, clock.monotonic() - start
        if not waiting and (seen or waited >= min(_FIRST, seconds)):
            return Drained(tuple(sorted(durable)), tuple(sorted(seen - durable)))
        if waited >= seconds:
            what = f"no version that was started after the notice within {seconds:.0f} s"
            remedy = "let the training save when Checkpointer.due says so; earlier versions are not lost"
            raise DeadlineExceeded(what, subject=", ".join(sorted(waiting)), remedy=remedy)
        clock.sleep(_LOOK)


def _started_before(before: Saves, now: Saves) -> int:
    """The number of the last save started before the notice; 0 if a new node worker has started to count."""
    return before.begun if now.begun >= before.begun else 0
