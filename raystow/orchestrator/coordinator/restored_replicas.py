"""Compares what ranks hold after a restore, as a save compares it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...storage.errors import RankRestarted
from ...storage.runtime.clock import Clock
from ...workers.protocol.messages import CompareReplicas, Incarnation, Message, ReplicaQuestions, ReplicasCompared
from .replica_comparison import ReplicaComparison

_ROUNDS = 4  # rounds that are kept


@dataclass
class ReplicaRound:
    """One comparison of all ranks. ``calls``: rank -> its process, and the number of its comparison."""

    world_size: int
    calls: dict[int, tuple[Incarnation, int]] = field(default_factory=dict)
    comparison: ReplicaComparison = field(default_factory=ReplicaComparison)
    restarted: int | None = None

    @property
    def missing(self) -> set[int]:
        """The ranks that have not reported."""
        return set(range(self.world_size)) - self.calls.keys()

    def answer(self, rank: int) -> Message | None:
        """The answer to a rank; None while it waits. Raises ``RankRestarted`` if a rank that others wait for has another process
        now."""
        if self.restarted is not None:
            raise RankRestarted(f"rank {self.restarted} was restarted while the ranks compared what they hold")
        if self.missing:
            return None
        if asked := self.comparison.questions({rank}):
            return ReplicaQuestions(asked)
        if self.comparison.is_open:
            return None
        return ReplicasCompared(tuple(map(str, self.comparison.differences())))


class RestoredReplicas:
    """The newest rounds.

    Attributes:
        changes: The number of changes that a waiting call may wait for.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._rounds, self.changes = clock, list[ReplicaRound](), 0

    def take(self, request: CompareReplicas) -> ReplicaRound:
        """Take what a rank reports, or its answers to questions. Returns its round."""
        rank, call = request.rank, (request.incarnation, request.number)
        for round in self._rounds:
            if rank in round.calls and round.calls[rank][0] != request.incarnation:
                round.restarted = rank
        fitting = (one for one in self._rounds if one.restarted is None and one.world_size == request.world_size)
        found = next((one for one in fitting if one.calls.get(rank, call) == call), None)
        if found is None:
            found = ReplicaRound(request.world_size)
            self._rounds = [*self._rounds, found][-_ROUNDS:]
        self.changes += 1
        if rank not in found.calls:
            found.calls[rank] = call
            found.comparison.note(rank, request.digests)
            if not found.missing:
                found.comparison.begin(self._clock.monotonic())
        found.comparison.take(request.answers)
        return found
