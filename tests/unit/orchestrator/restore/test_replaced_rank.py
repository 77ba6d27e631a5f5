"""A rank whose process is replaced during a restore: the others begin again with its new process."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from helpers.builders import empty_record, memory_repository
from helpers.fake_clock import FakeClock
from helpers.processes import incarnation

from raystow.orchestrator.restore.agreement import ClusterAgreement
from raystow.orchestrator.restore.rounds import RestoreRounds
from raystow.orchestrator.restore.version_cache import VersionCache
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import RankRestarted
from raystow.storage.format.root import Entry
from raystow.workers.protocol.coordinator_client import CoordinatorClient
from raystow.workers.protocol.messages import Acknowledged, CoordinatorRequest, Message, RestoreChoice, RestoreVote

TIMEOUT = 60.0


class RestoringRanks(CoordinatorClient):
    """Two ranks that restore from a repository with one version; each waits in a thread for the others."""

    def __init__(self) -> None:
        clock = FakeClock()
        self.repository = memory_repository(clock)
        self.committer = Committer(self.repository, "me")
        self.rounds = RestoreRounds(self.repository, clock, VersionCache(self.repository, on_read=self.committer.notice))
        self.changed = threading.Condition()
        self.threads = ThreadPoolExecutor()
        self.first = self.commit(1)

    def commit(self, step: int) -> Entry:
        return self.committer.commit(empty_record(self.committer, step)).entry

    def call(self, vote: CoordinatorRequest[Any], timeout: float) -> Message:
        """Answer as the coordinator does."""
        assert isinstance(vote, RestoreVote)
        with self.changed:
            round = self.rounds.vote(vote)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: round.answers(vote.tried), TIMEOUT)
            entry = round.answer(vote.tried)
        return Acknowledged() if entry is None else RestoreChoice(entry)

    def send(self, request: CoordinatorRequest[Any]) -> None: ...

    def vote(self, rank: int, process: str, tried: Entry | None = None) -> None:
        """Vote for a process that dies while it waits for the answer."""
        with self.changed:
            self.rounds.vote(RestoreVote(rank, 2, incarnation(process), 1, TIMEOUT, tried))
            self.changed.notify_all()

    def replace(self, rank: int, process: str) -> None:
        with self.changed:
            self.rounds.left(rank, incarnation(process))
            self.changed.notify_all()

    def agreement(self, rank: int, process: str, timeout: float = TIMEOUT) -> ClusterAgreement:
        vote = RestoreVote(rank, 2, incarnation(process), 1, timeout)
        return ClusterAgreement(self.repository, self, vote, itertools.count(2), lambda: "no node worker")

    def restore(self, rank: int, process: str) -> Future[list[Entry | None]]:
        """Restore in a thread. The result: the versions that the rank has restored, in order."""
        return self.threads.submit(self._restore, self.agreement(rank, process))

    def _restore(self, agreement: ClusterAgreement) -> list[Entry | None]:
        restored = [agreement.settle(None, "")]
        while (answer := agreement.settle(restored[-1], "")) != restored[-1]:
            restored.append(answer)
        return restored

    def until_voted(self, rank: int) -> None:
        """Wait until a rank has restored a version and waits for the other one."""
        with self.changed:
            assert self.changed.wait_for(
                lambda: self.rounds.open_round is not None and rank in self.rounds.open_round.votes, TIMEOUT
            )


@pytest.fixture
def ranks():
    made = RestoringRanks()
    yield made
    made.threads.shutdown()


def test_a_vote_of_a_dead_process_does_not_fail_the_new_ones(ranks):
    """All ranks were killed when one of them had voted; their new processes come one after another."""
    ranks.vote(1, "old 1")
    zero = ranks.restore(0, "new 0")
    ranks.until_voted(0)
    ranks.replace(1, "new 1")
    one = ranks.restore(1, "new 1")
    assert zero.result(TIMEOUT) == one.result(TIMEOUT) == [ranks.first]
    assert len(ranks.rounds.restored()) == 1


def test_a_rank_is_replaced_again_and_again(ranks):
    ranks.vote(1, "process 0")
    zero = ranks.restore(0, "survivor")
    for number in range(1, 4):
        ranks.until_voted(0)
        ranks.replace(1, f"process {number}")
        ranks.vote(1, f"process {number}")
    ranks.until_voted(0)
    ranks.vote(1, "process 3", ranks.first)
    assert zero.result(TIMEOUT) == [ranks.first]


def test_the_ranks_agree_on_a_version_committed_meanwhile(ranks):
    ranks.vote(1, "old 1")
    zero = ranks.restore(0, "new 0")
    ranks.until_voted(0)
    newer = ranks.commit(2)
    ranks.replace(1, "new 1")
    one = ranks.restore(1, "new 1")
    assert zero.result(TIMEOUT) == [ranks.first, newer]
    assert one.result(TIMEOUT) == [newer]


def test_no_round_begins_after_the_timeout(ranks):
    ranks.vote(1, "old 1")
    zero = ranks.agreement(0, "new 0", timeout=0.0)
    assert zero.settle(None, "") == ranks.first
    ranks.replace(1, "new 1")
    with pytest.raises(RankRestarted, match="rank 1 was restarted during the restore"):
        zero.settle(ranks.first, "")
