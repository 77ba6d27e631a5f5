"""Two ranks that restore, and votes in their name."""

from __future__ import annotations

from helpers.builders import empty_record, memory_repository
from helpers.fake_clock import FakeClock
from helpers.processes import incarnation
from raystow.orchestrator.restore.round import RestoreRound
from raystow.orchestrator.restore.rounds import RestoreRounds
from raystow.orchestrator.restore.version_cache import VersionCache
from raystow.storage.commit.committer import Committer
from raystow.storage.format import keys
from raystow.storage.format.root import Entry
from raystow.workers.protocol.messages import RestoreVote


class RestoringRun:
    """Two ranks and a repository."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.repository = memory_repository(self.clock)
        self.committer = Committer(self.repository, "me")
        self.damaged: list[int] = []
        self.known = VersionCache(self.repository, on_read=self.committer.notice)
        is_current, on_fall_back = self.committer.is_current, lambda: self.damaged.append(1)
        self.rounds = RestoreRounds(self.repository, self.clock, self.known, is_current=is_current, on_fall_back=on_fall_back)

    def commit(self, steps: int) -> list[Entry]:
        return [self.committer.commit(empty_record(self.committer, step)).entry for step in range(steps)]

    def vote(
        self,
        rank: int,
        tried: Entry | None = None,
        damage: str = "",
        *,
        number: int = 1,
        process: str = "a",
        **fields: object,
    ) -> RestoreRound:
        return self.rounds.vote(RestoreVote(rank, 2, incarnation(f"{process}{rank}"), number, 60.0, tried, damage, **fields))

    def leases(self) -> list[tuple[int, str] | None]:
        return [keys.leased(info.key) for info in self.repository.store.list(keys.LEASES)]
