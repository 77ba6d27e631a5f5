"""What a coordinator is at, as plain data, for whoever looks on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..storage.format.root import Entry
from .coordinator import Attempt, Phase

_LAST = 10  # failures that are told of


@dataclass(frozen=True)
class Open:
    """An attempt under way. ``begun`` and ``finished``: how many of its ``world_size`` ranks have begun to save, and are coded.
    ``nodes``: of those ranks; ``stored``: how many have made their part durable. ``age`` and ``left``: seconds since the first
    rank began, and until it is given up."""

    id: int
    attempt: str
    step: int
    phase: str
    world_size: int
    begun: int
    finished: int
    nodes: int
    stored: int
    age: float
    left: float


@dataclass(frozen=True)
class Failure:
    """An attempt that was given up, so many seconds ago."""

    id: int
    attempt: str
    step: int
    reason: str
    ago: float


@dataclass(frozen=True)
class Overview:
    """A coordinator's view of its repository at ``uri``. ``newest``: the newest version, None if there is none, ``age``: the
    seconds since it was made. ``aborted_in_a_row``: attempts given up since the newest version was committed."""

    uri: str
    repository: str
    epoch: int
    newest: Entry | None
    age: float | None
    aborted_in_a_row: int
    attempts: tuple[Open, ...]
    failures: tuple[Failure, ...]


def under_way(attempts: Sequence[Attempt], now: float) -> tuple[Open, ...]:
    """The attempts that are not over, oldest first. ``now``: monotonic seconds of the clock that they were made by."""
    return tuple(
        Open(
            id=attempt.id,
            attempt=attempt.attempt,
            step=attempt.step,
            phase=attempt.phase.value,
            world_size=attempt.world_size,
            begun=len(attempt.ranks),
            finished=len(attempt.covered),
            nodes=len(attempt.nodes),
            stored=len(attempt.stored),
            age=now - attempt.opened,
            left=max(0.0, attempt.deadline - now),
        )
        for attempt in sorted(attempts, key=lambda attempt: attempt.id)
        if not attempt.phase.over
    )


def failures(attempts: Sequence[Attempt], now: float) -> tuple[Failure, ...]:
    """The last attempts that were given up, the newest first."""
    given_up = sorted((a for a in attempts if a.phase is Phase.ABORTED), key=lambda attempt: attempt.ended, reverse=True)
    return tuple(Failure(a.id, a.attempt, a.step, a.reason, now - a.ended) for a in given_up[:_LAST])
