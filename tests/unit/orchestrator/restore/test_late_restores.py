"""A rank that comes late to a restore, or reads nothing, is named to the ranks that wait, and learns what became of it."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from helpers.processes import A0, A1, B0, incarnation
from helpers.restoring_run import RestoringRun
from msgspec.structs import replace

from raystow.orchestrator import heartbeat
from raystow.orchestrator.restore.agreement import ClusterAgreement
from raystow.orchestrator.restore.round import RestoreRound
from raystow.orchestrator.restore.rounds import RestoreRounds
from raystow.storage.errors import ClusterError, DeadlineExceeded
from raystow.storage.format.root import Entry
from raystow.workers.protocol.coordinator_client import CoordinatorClient
from raystow.workers.protocol.messages import (
    CoordinatorRequest,
    Incarnation,
    Message,
    RankReading,
    RestoreChoice,
    RestoreVote,
    UnusedNames,
)


@pytest.fixture
def run() -> RestoringRun:
    return RestoringRun()


def fail_without(run: RestoringRun, rank: int, process: Incarnation | None = None) -> RestoreRound:
    """Let the other rank wait for ``rank`` until it gives up."""
    run.rounds = RestoreRounds(run.repository, run.clock, run.known, member=lambda of: process if of == rank else None)
    round = run.vote(1 - rank)
    run.clock.time += 61
    run.rounds.tick()
    return round


def test_a_late_rank_learns_at_once_that_the_others_gave_up(run):
    """Also what it had not done, and when they gave up; its next restore is a new round."""
    (entry,) = run.commit(1)
    round = fail_without(run, 1, A1)
    assert run.rounds.in_use
    run.clock.time += 30
    late = run.vote(1)
    assert late.answers(None)
    for reported in (round, late):
        with pytest.raises(
            DeadlineExceeded, match=r"rank 1 \(.*\) has not called restore for 61 s; rank 0 gave up at \d\d:\d\d:\d\d UTC"
        ):
            reported.answer(None)
    assert not run.vote(1, number=2).answers(None)
    assert run.vote(0, number=2).answer(None) == entry


def test_a_rank_is_told_however_late_it_comes(run):
    """The coordinator alone is not kept alive for it."""
    (entry,) = run.commit(1)
    fail_without(run, 1, A1)
    run.clock.time += 3600
    assert not run.rounds.in_use
    with pytest.raises(DeadlineExceeded, match="rank 0 gave up"):
        run.vote(1).answer(None)
    round = run.vote(1, number=2)
    assert run.vote(0, number=2) is round
    assert round.answer(None) == entry


def test_a_late_rank_learns_that_another_was_interrupted(run):
    run.commit(1)
    run.rounds = RestoreRounds(run.repository, run.clock, run.known, member=lambda rank: (A0, A1)[rank])
    run.vote(0), run.vote(0, error="KeyboardInterrupt()")
    with pytest.raises(ClusterError, match="rank 0 could not restore: KeyboardInterrupt"):
        run.vote(1).answer(None)


def test_a_process_that_starts_late_waits_with_a_warning(run):
    """It may be of a restarted training, whose other ranks come soon."""
    (entry,) = run.commit(1)
    fail_without(run, 1)
    round = run.vote(1)
    assert not round.answers(None)
    assert round.warns(RestoreVote(1, 2, A1, 1, 60.0))
    said = r"rank 1 \(not started\) has not called restore for 61 s; rank 0 gave up at \S+ UTC; rank 1 waits for them again"
    assert re.fullmatch(said, round.warning.text)
    assert not round.warns(RestoreVote(1, 2, A1, 1, 60.0, last_warning=round.warning.number))
    assert run.vote(0, process="b").answer(None) == entry


@pytest.mark.parametrize("how", ["restarted", "again"])
def test_a_failed_round_is_forgotten(run, how):
    """Once a rank is restarted or restores again."""
    (entry,) = run.commit(1)
    fail_without(run, 1, A1)
    if how == "restarted":
        run.rounds.left(0, B0)
    else:
        run.vote(0, number=2)
    assert (how == "again") is run.rounds.in_use
    round = run.vote(1)
    assert round.answers(None) is (how == "again")
    assert run.vote(0, number=2).answer(None) == round.answer(None) == entry


def test_a_rank_that_does_not_restore_is_named_after_30_s(run, caplog):
    run.commit(1)
    run.rounds = RestoreRounds(run.repository, run.clock, run.known, member=lambda rank: incarnation(f"process {rank} on host"))
    round, changes = run.vote(1), run.rounds.changes
    run.clock.time += 29
    run.rounds.tick()
    assert round.warning is None
    run.clock.time += 2
    run.rounds.tick()
    text = "rank 0 (process 0 on host) has not called restore for 31 s; rank 1 waits"
    assert round.warning.text == text
    assert f"restore: {text}" in caplog.text
    assert run.rounds.changes > changes
    vote = RestoreVote(1, 2, A1, 1, 60.0)
    assert round.warns(vote)
    run.clock.time += 20
    run.rounds.tick()
    assert round.warning.number == 1, "the next warning comes after 60 s"


def test_a_rank_whose_store_hangs_is_named_with_its_store(run):
    """To the ranks that wait, and in the error of all: it has joined, but reads nothing."""
    waiting, entry = joined(run)
    run.clock.time += 35
    run.rounds.reading(RankReading(1, A1, 1, 60.0, 34.0, "file:///mnt/run"))
    run.rounds.tick()
    assert waiting.warning.text == "rank 1 (a1) has read nothing for 34 s from file:///mnt/run; rank 0 waits"
    assert waiting.warns(RestoreVote(0, 2, A0, 1, 60.0, entry))
    run.clock.time += 26
    run.rounds.tick()
    assert_told(run, entry, "read nothing for 60 s from file:///mnt/run")


def assert_told(run: RestoringRun, entry: Entry, what: str) -> None:
    """The rank that waits gets a warning about the other rank, and the latter a warning about itself."""
    who = "rank 1 (a1) has not restored version 1 (step 0); rank 1", "rank 1 (this rank)"
    for rank in range(2):
        with pytest.raises(DeadlineExceeded, match=re.escape(f"restore: {who[rank]} has {what}; rank 0 gave up at ")):
            run.vote(rank, entry).answer(entry)


def joined(run: RestoringRun) -> tuple[RestoreRound, Entry]:
    """Both ranks have joined, rank 0 has restored, and rank 1 reads."""
    (entry,) = run.commit(1)
    run.vote(0), run.vote(1)
    return run.vote(0, entry), entry


def test_a_rank_that_is_frozen_is_named_after_30_s(run):
    """It cannot tell that it reads nothing."""
    waiting, entry = joined(run)
    for _ in range(2):
        run.clock.time += 20
        run.rounds.reading(RankReading(1, A1, 1, 60.0))
        run.rounds.tick()
        assert waiting.warning is None
    run.clock.time += 31
    run.rounds.tick()
    assert waiting.warning.text == "rank 1 (a1) has read nothing for 31 s; rank 0 waits"
    run.clock.time += 30
    run.rounds.tick()
    assert_told(run, entry, "read nothing for 61 s")


def test_ranks_that_all_hang_are_told_so(run):
    (entry,) = run.commit(1)
    run.vote(0), run.vote(1)
    run.clock.time += 61
    run.rounds.tick()
    for rank in range(2):
        with pytest.raises(DeadlineExceeded, match=rf"rank {rank} \(this rank\) has read nothing for 61 s \("):
            run.vote(rank, entry).answer(entry)


def test_a_warning_ends_when_the_rank_comes(run):
    """The first rank votes again then, about the version that it has restored."""
    (entry,) = run.commit(1)
    round = run.vote(0)
    run.clock.time += 31
    run.rounds.tick()
    assert round.warns(RestoreVote(0, 2, A0, 1, 60.0))
    run.vote(1), run.vote(0, entry)
    assert not round.warns(RestoreVote(0, 2, A0, 1, 60.0, entry))
    run.clock.time += 31
    run.rounds.tick()
    assert round.waits(RestoreVote(0, 2, A0, 1, 60.0, entry)).text.startswith("rank 1 (a1) has read nothing")


def test_a_rank_that_compares_names_has_the_warning(run):
    (entry,) = run.commit(1)
    for rank in range(2):
        run.rounds.vote(RestoreVote(rank, 2, incarnation(f"a{rank}"), 1, 60.0, names=rank))
    reported = UnusedNames(1, 2, A1, 1, 60.0, entry, 8, b"\1")
    round = run.rounds.compare(reported)
    run.clock.time += 31
    run.rounds.tick()
    assert round.waits(reported).text == "rank 0 (a0) has read nothing for 31 s; rank 1 waits"
    assert not round.warns(replace(reported, last_warning=1))


def test_ranks_that_read_are_not_late_for_a_new_coordinator(run):
    """Rank 1 reads on, and does not vote before it has restored the version."""
    _, entry = joined(run)
    run.rounds = RestoreRounds(run.repository, run.clock, run.known)
    waiting = run.vote(0, entry)
    for _ in range(3):
        run.clock.time += 20
        run.rounds.reading(RankReading(1, A1, 1, 60.0))
        run.rounds.tick()
        assert waiting.warning is None
    run.vote(1, entry)
    assert waiting.answer(entry) == entry


def test_a_rank_tells_that_it_reads_before_others_warn():
    reported = list[RankReading]()
    heartbeat.Heartbeat(reported.append, late=0.0).beat(RestoreVote(1, 2, A1, 1, 600.0))
    assert reported == [RankReading(1, A1, 1, 600.0)]


def test_a_rank_that_reads_again_is_not_blamed(run):
    (entry,) = run.commit(1)
    waiting = run.vote(0, run.vote(0).answer(None))
    run.vote(1)
    run.rounds.reading(RankReading(1, A1, 1, 60.0, 31.0, "file:///mnt/run"))
    run.rounds.reading(RankReading(1, A1, 1, 60.0))
    run.rounds.tick()
    assert waiting.warning is None
    run.vote(1, entry)
    assert waiting.answer(entry) == entry


class HangingPort(CoordinatorClient):
    """A coordinator that chooses a version, and receives what a rank tells while it reads."""

    def __init__(self, choice: RestoreChoice) -> None:
        self._choice, self.reports, self.heard = choice, list[RankReading](), threading.Semaphore(0)

    def call(self, request: CoordinatorRequest[Any], timeout: float) -> Message:
        return self._choice

    def send(self, request: CoordinatorRequest[Any]) -> None:
        assert isinstance(request, RankReading)
        self.reports.append(request)
        self.heard.release()


def test_a_rank_tells_what_hangs(run, monkeypatch, caplog):
    """In its own log, and to the others, until it reads again."""
    monkeypatch.setattr(heartbeat, "LATE", 0.01)
    (entry,) = run.commit(1)
    port = HangingPort(RestoreChoice(entry))
    opening = RestoreVote(1, 2, A1, 1, 600.0)
    agreement = ClusterAgreement(run.repository, port, opening, iter(range(2, 9)), lambda: "no node worker")
    assert agreement.settle(None, "") == entry
    agreement.version(entry)
    assert port.heard.acquire(timeout=30)
    uri = run.repository.uri
    assert port.reports[0].quiet > 0
    assert port.reports[0].source == uri
    assert f"restoring version 1: nothing was read for 0 s from {uri}" in caplog.text
    agreement._watch.stop()
    reported = len(port.reports)
    agreement.reading()
    assert port.reports[reported:][-1] == RankReading(1, A1, 1, 600.0)
    agreement.give_up("interrupted")
