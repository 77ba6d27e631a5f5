"""A coordinator names the ranks and nodes that keep a save waiting, long before its deadline, and ranks with other metrics."""

from __future__ import annotations

import msgspec
import pytest
from helpers.coordinated_run import CoordinatedRun, coordinated_run, part
from helpers.processes import incarnation

from raystow.storage.format.rank_spans import ranks_text
from raystow.workers.protocol.messages import Ticket

METRICS = {"epoch": "1", "loss": "0.5"}, {"epoch": "1", "loss": "0.25", "top": "3"}


@pytest.fixture
def run() -> CoordinatedRun:
    return coordinated_run()


def warned(run: CoordinatedRun, ticket: Ticket, last_warning: int = 0) -> str:
    late = run.core.late(ticket, last_warning)
    return "" if late is None else late.text


def test_a_rank_that_does_not_save_is_named_after_30_s(run: CoordinatedRun, caplog: pytest.LogCaptureFixture) -> None:
    """On the node of the first rank that waits, and again after 60 s."""
    run.core.join(1, incarnation("process 812 on host-b"), 2)
    ticket = run.begin(0)
    run.clock.time += 29
    run.core.tick()
    assert warned(run, ticket) == ""
    run.clock.time += 2
    changes = run.core.changes
    run.core.tick()
    text = "rank 1 (process 812 on host-b) has not called save for 31 s; rank 0 waits"
    assert warned(run, ticket) == text
    assert f"save of step 1: {text}" in caplog.text
    assert run.core.changes > changes, "calls that wait are woken"
    other = msgspec.structs.replace(ticket, node=1)
    assert warned(run, ticket, last_warning=1) == warned(run, other) == ""
    run.clock.time += 28
    run.core.tick()
    assert warned(run, ticket, last_warning=1) == ""


def test_a_rank_that_saves_but_does_not_finish_is_named(run: CoordinatedRun) -> None:
    """Its store may hang, so that its node worker takes no more data."""
    tickets = [run.begin(0), run.begin(1)]
    run.core.finished(tickets[0], 0, 7)
    run.clock.time += 31
    run.core.tick()
    assert "rank 1 (" in warned(run, tickets[0])
    assert "begun to save, but not delivered all data" in warned(run, tickets[0])


def test_a_node_that_does_not_store_is_named(run: CoordinatedRun) -> None:
    tickets = [run.begin(0), run.begin(1)]
    for rank, ticket in enumerate(tickets):
        run.core.finished(ticket, rank, 7 if rank == 0 else 0)
    run.clock.time += 20
    run.core.fragment(tickets[1], part(tickets[1].node))
    run.clock.time += 11
    run.core.tick()
    assert warned(run, tickets[1]) == "", "a node has stored its part 11 s ago"
    run.clock.time += 25
    run.core.tick()
    assert "rank 0 (" in warned(run, tickets[1])
    assert "stored nothing more for 36 s" in warned(run, tickets[1])


def test_late_ranks_are_listed_in_spans() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([7, 0, 1, 2, 4, 5, 6]) == "ranks 0-2, 4-7"
    assert ranks_text(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"


def test_metrics_of_other_ranks_are_named_once(run: CoordinatedRun) -> None:
    """A version has the metrics of rank 0, whichever rank comes first."""
    for step in (1, 2):
        tickets = [run.begin(rank, step, save=step, metrics=METRICS[rank]) for rank in (1, 0)][::-1]
        run.seal(tickets)
        text = warned(run, tickets[0])
        what = "ranks have other metrics than rank 0, whose metrics the version has: "
        differing = "loss (rank 0: 0.5; rank 1: 0.25), top (rank 0: none; rank 1: 3)"
        assert text == (what + differing if step == 1 else "")
        assert warned(run, tickets[1]) == ""
        run.commit()
        newest = run.committer.catalog.latest()
        assert newest is not None
        assert newest.metrics == {"epoch": 1, "loss": 0.5}
