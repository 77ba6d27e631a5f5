"""The state of a coordinator and of a whole cluster at one moment, as plain data for tools that only read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...workers.protocol.messages import CoordinatorStatus, FailedAttempt, NodeStatus, OpenAttempt
from .attempt import Attempt, Phase

_FAILURES = 10  # failed attempts that are reported


@dataclass(frozen=True)
class ClusterStatus:
    """``at``: seconds since 1970. ``coordinators``: by actor name; ``nodes``: by Ray's id of the node; None for one that did not
    answer in time. ``trouble``: why the cluster could not be asked; then the rest is empty."""

    at: float
    coordinators: Mapping[str, CoordinatorStatus | None]
    nodes: Mapping[str, NodeStatus | None]
    trouble: str = ""


def open_attempts(attempts: Sequence[Attempt], now: float) -> tuple[OpenAttempt, ...]:
    """The attempts that are not over, oldest first. ``now``: monotonic seconds."""
    return tuple(
        OpenAttempt(
            id=attempt.id,
            attempt=attempt.attempt,
            step=attempt.step,
            phase=attempt.phase.value,
            world_size=attempt.world_size + len(attempt.parts),
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


def failed_attempts(attempts: Sequence[Attempt], now: float) -> tuple[FailedAttempt, ...]:
    """The last attempts that were aborted, newest first."""
    aborted = sorted((a for a in attempts if a.phase is Phase.ABORTED), key=lambda attempt: attempt.ended, reverse=True)
    return tuple(FailedAttempt(a.id, a.attempt, a.step, a.reason, now - a.ended) for a in aborted[:_FAILURES])
