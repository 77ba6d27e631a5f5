"""Another thread reads a restore round during a vote: no rank is answered before the vote is over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.builders import empty_record
from helpers.processes import incarnation

from raystow.orchestrator.restore import rounds as rounds_module
from raystow.orchestrator.restore.round import RestoreRound
from raystow.orchestrator.restore.rounds import RestoreRounds
from raystow.orchestrator.restore.version_cache import VersionCache
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Damaged, NotFound, RaystowError, StateError
from raystow.storage.format.root import Entry
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores.memory import MemoryStore
from raystow.workers.protocol.messages import RestoreVote

Answer = Entry | type[RaystowError] | None


class RoundReader:
    """Votes of two ranks, and what a waiting rank is answered at each store call and token of a vote."""

    def __init__(self, committer: Committer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounds = RestoreRounds(committer.catalog, SYSTEM, VersionCache(committer.catalog))
        self.during: list[Answer] = []
        """What waiting ranks were answered during the last vote."""
        self._waiting: tuple[RestoreRound, Entry | None] | None = None
        for name in ("put", "delete", "get_tagged"):
            monkeypatch.setattr(MemoryStore, name, self._looking(getattr(MemoryStore, name)))
        for name in ("RestoreGroup", "StateError", "none_left"):
            monkeypatch.setattr(rounds_module, name, self._looking(getattr(rounds_module, name)))

    def vote(self, rank: int, tried: Entry | None = None, damage: str = "", version: str = "latest") -> Answer:
        """Vote, and return what ranks that have ``tried`` this version are answered now."""
        self.during = []
        round = self.rounds.vote(RestoreVote(rank, 2, incarnation(f"a{rank}"), 1, 60.0, tried, damage, version=version))
        self._waiting = round, tried
        return self._answered(round, tried)

    def _looking(self, call: Callable[..., object]) -> Callable[..., object]:
        def looking(*args: object, **kwargs: object) -> object:
            if self._waiting is not None and self._waiting[0].answers(self._waiting[1]):
                self.during.append(self._answered(*self._waiting))
            return call(*args, **kwargs)

        return looking

    @staticmethod
    def _answered(round: RestoreRound, tried: Entry | None) -> Answer:
        try:
            return round.answer(tried)
        except RaystowError as error:
            return type(error)


@pytest.fixture
def reader(committer: Committer, monkeypatch: pytest.MonkeyPatch) -> RoundReader:
    return RoundReader(committer, monkeypatch)


def commit(committer: Committer, steps: int) -> list[Entry]:
    return [committer.commit(empty_record(committer, step)).entry for step in range(steps)]


def test_no_rank_is_told_no_version_during_the_last_fall_back(committer, reader):
    (only,) = commit(committer, 1)
    reader.vote(0), reader.vote(1), reader.vote(0, only)
    assert reader.vote(1, only, "it is cut") is Damaged
    assert set(reader.during) <= {Damaged}


def test_no_rank_is_told_an_unleased_version(committer, reader):
    older, newest = commit(committer, 2)
    reader.vote(0), reader.vote(1), reader.vote(0, newest)
    assert reader.vote(1, newest, "it is cut") == older
    assert reader.during == []


def test_a_dropped_candidate_is_not_told(committer, reader, monkeypatch):
    oldest, dropped, newest = commit(committer, 3)
    reader.vote(0), reader.vote(1), reader.vote(0, newest)
    lease = committer.catalog.lease

    def lost(version):
        if version.id == dropped.id:
            committer.catalog.store.get_tagged("root.json", max_bytes=1 << 20)  # the rank reads the round now
            raise NotFound("version 2 was dropped meanwhile")
        return lease(version)

    monkeypatch.setattr(committer.catalog, "lease", lost)
    assert reader.vote(1, newest, "it is cut") == oldest
    assert reader.during == []


def test_no_rank_is_answered_before_the_votes_are_compared(committer, reader):
    commit(committer, 2)
    reader.vote(0, version="1")
    assert reader.vote(1, version="2") is StateError
    assert set(reader.during) <= {StateError}
