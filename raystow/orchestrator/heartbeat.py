"""Tells the coordinator that a rank restores or replays on, so that the other ranks wait for it."""

from __future__ import annotations

from collections.abc import Callable

from ..storage.clock import SYSTEM
from ..workers.protocol.messages import JournalVote, RankReading, RestoreVote


class Heartbeat:
    """Thread-safe. ``send`` must not wait for an answer, since that would delay the rank."""

    def __init__(self, send: Callable[[RankReading], None]) -> None:
        self._send, self._sent = send, SYSTEM.monotonic()

    def beat(self, vote: RestoreVote | JournalVote) -> None:
        """Tell that the rank has come further since this vote, if the last time was a quarter of its ``timeout`` ago."""
        now = SYSTEM.monotonic()
        if now >= self._sent + vote.timeout / 4:
            self._sent = now
            self._send(RankReading(vote.rank, vote.incarnation, vote.number, vote.timeout))
