"""Ranks that restore tensors of different names compare the names that they leave unused, and each wait has a deadline."""

from __future__ import annotations

import pytest
from helpers.builders import empty_record, memory_repository
from helpers.fake_clock import FakeClock
from helpers.processes import incarnation

from raystow.orchestrator.restore.round import RestoreRound
from raystow.orchestrator.restore.rounds import RestoreRounds
from raystow.orchestrator.restore.version_cache import VersionCache
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import ClusterError, DeadlineExceeded, RankRestarted
from raystow.storage.format.root import Entry
from raystow.workers.protocol.messages import RestoreVote, UnusedNames


class ComparingRun:
    """Ranks that restore tensors of different names of one version, ``entry``."""

    def __init__(self, world_size: int = 3) -> None:
        self.clock = FakeClock()
        self.repository = memory_repository(self.clock)
        self.committer = Committer(self.repository, "me")
        self.known = VersionCache(self.repository, on_read=self.committer.notice)
        self.rounds = RestoreRounds(self.repository, self.clock, self.known)
        self.entry = self.commit()
        self.world_size = world_size
        for rank in range(world_size):
            self.round = self.say(rank)
        assert not self.round.alike

    def commit(self) -> Entry:
        return self.committer.commit(empty_record(self.committer, 1)).entry

    def say(
        self, rank: int, tried: Entry | None = None, damage: str = "", *, process: str = "a", error: str = ""
    ) -> RestoreRound:
        vote = RestoreVote(rank, self.world_size, incarnation(f"{process}{rank}"), 1, 60.0, tried, damage, error, names=rank)
        return self.rounds.vote(vote)

    def tell(self, rank: int, *bits: int, names: int = 12, process: str = "a") -> RestoreRound:
        unused = sum(1 << bit for bit in bits).to_bytes(-(-names // 8), "little") if bits else b""
        who = rank, self.world_size, incarnation(f"{process}{rank}"), 1, 60.0
        return self.rounds.compare(UnusedNames(*who, self.entry, names if bits else 0, unused))


def test_ranks_that_restore_the_same_names_compare_nothing():
    run = ComparingRun()
    for rank in range(3):
        round = run.rounds.vote(RestoreVote(rank, 3, incarnation(f"b{rank}"), 1, 60.0, names=7))
    assert round.alike


@pytest.mark.parametrize(
    ("reports", "common"),
    [
        ([(0, 1), (1, 2), (0, 2)], (0, 0)),
        ([(0, 9, 11), (9, 11), (9, 1, 11)], (0, 0b1010)),
        ([(3,), (3, 4, 5), (3, 5)], (0b1000, 0)),
    ],
)
def test_names_are_unused_if_no_rank_uses_them(reports, common):
    run = ComparingRun()
    for rank in (2, 0):
        assert not run.tell(rank, *reports[rank]).has_compared
        assert not run.tell(rank, *reports[rank]).has_compared  # a repetition
    changes = run.rounds.changes
    assert run.tell(1, *reports[1]).has_compared
    assert run.rounds.changes > changes
    assert run.round.unused_by_all() == bytes(common)


@pytest.mark.parametrize("how", ["tells", "has restored", "finds damage"])
def test_ranks_wait_for_no_other_if_one_uses_all_names(how):
    run = ComparingRun()
    assert not run.tell(0, 1).has_compared
    if how == "tells":
        run.tell(2)
    else:
        run.say(2, run.entry, "it is cut" if how == "finds damage" else "")
    assert run.round.has_compared
    assert run.round.unused_by_all() == b""
    assert run.tell(1, 1).unused_by_all() == b""


def test_names_are_compared_again_after_a_fall_back():
    run = ComparingRun(2)
    older, newest = run.entry, run.commit()
    run.say(0, process="b"), run.say(1, process="b")
    run.round, run.entry = run.say(0, process="b"), newest
    for rank in range(2):
        run.tell(rank, 0, process="b")
        run.say(rank, newest, "it is cut", process="b")
    assert run.round.candidates == [older]
    run.entry = older
    assert not run.tell(0, 1, process="b").has_compared
    assert run.tell(1, 1, 2, process="b").unused_by_all() == bytes((2, 0))


def test_a_comparison_ends_if_a_rank_gives_up():
    run = ComparingRun()
    run.tell(0, 1)
    run.say(1, error="into has another shape")
    assert run.round.has_compared
    with pytest.raises(ClusterError, match="rank 1 could not restore: into has another shape"):
        run.round.unused_by_all()
    with pytest.raises(ClusterError, match="rank 1"):
        run.tell(2, 1).unused_by_all()


def test_all_ranks_have_the_result_although_one_gives_up_then():
    run = ComparingRun()
    for rank in range(3):
        run.tell(rank, 3)
    run.say(0, error="saved but not in `into`: d")
    assert [run.tell(rank, 3).unused_by_all() for rank in (1, 2)] == [bytes((8, 0))] * 2


def test_a_comparison_ends_if_a_process_is_replaced():
    run = ComparingRun()
    run.tell(0, 1)
    run.rounds.left(2, incarnation("b2"))
    with pytest.raises(RankRestarted):
        run.round.unused_by_all()


def test_a_comparison_has_a_deadline():
    run = ComparingRun()
    run.clock.time += 40
    run.tell(0, 1), run.tell(2, 1)
    run.clock.time += 40
    run.rounds.tick()
    assert not run.round.has_compared
    run.clock.time += 40
    run.rounds.tick()
    assert run.round.has_compared
    with pytest.raises(DeadlineExceeded, match=r"rank 1 "):
        run.round.unused_by_all()


def test_ranks_that_have_read_different_names_fail():
    for odd in ((5, 20), (5, 3)):
        run = ComparingRun()
        run.tell(0, 1)
        run.tell(1, 1, names=odd[1])
        with pytest.raises(ClusterError, match="rank 1 has found other names in version 1"):
            run.round.unused_by_all()


def test_a_comparison_of_an_unknown_restore_begins_again():
    """As after a restart of the coordinator."""
    run = ComparingRun()
    with pytest.raises(RankRestarted, match="knows no restore of rank 0"):
        run.tell(0, 1, process="b")
    run.rounds = RestoreRounds(run.repository, run.clock, run.known)
    with pytest.raises(RankRestarted, match="knows no restore of rank 1"):
        run.tell(1, 1)
