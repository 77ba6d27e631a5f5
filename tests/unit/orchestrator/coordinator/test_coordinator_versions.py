"""The state machine of the coordinator, driven step by step: staged saves, bases of deltas, and rollbacks."""

from __future__ import annotations

import pytest
from helpers.begins import begin_of
from helpers.coordinated_run import CoordinatedRun, coordinated_run, part
from helpers.processes import A1, incarnation

from raystow.orchestrator.coordinator.attempt import Phase
from raystow.storage.errors import SaveFailed
from raystow.storage.format.version_record import RestoreInfo
from raystow.workers.protocol.messages import Ticket


@pytest.fixture
def run() -> CoordinatedRun:
    return coordinated_run()


def test_a_staged_save_is_listed_until_it_is_committed(run: CoordinatedRun) -> None:
    tickets = [run.begin(0), run.begin(1)]
    for rank, ticket in enumerate(tickets):
        run.core.finished(ticket, rank, 7 if rank == 0 else 0)
    infos = [part(ticket.node) for ticket in tickets]
    run.core.staged(tickets[0], infos[0])
    assert run.core.held() == []
    run.clock.time += 5
    run.core.staged(tickets[1], infos[1])
    (held,) = run.core.held()
    assert (held.step, held.fragments) == (1, tuple(infos))
    run.clock.time += 5
    for ticket, info in zip(tickets, infos, strict=True):
        run.core.fragment(ticket, info)
    assert run.core.held() == [held]
    run.commit()
    assert run.core.held() == []
    latest = run.committer.catalog.latest()
    assert latest is not None
    assert latest.record == held  # including the time of creation


def stage(run: CoordinatedRun, step: int, *, nodes: int = 2) -> list[Ticket]:
    """Save on both ranks, and report the parts of ``nodes`` nodes as staged."""
    tickets = [run.begin(0, step, save=step), run.begin(1, step, save=step)]
    for rank, ticket in enumerate(tickets):
        run.core.finished(ticket, rank, 7 if rank == 0 else 0)
    run.clock.time += 1
    for ticket in tickets[:nodes]:
        run.core.staged(ticket, part(ticket.node))
    return tickets


def test_a_staged_save_stays_listed_after_a_node_dies(run: CoordinatedRun) -> None:
    tickets = stage(run, 1)
    (promised,) = run.core.held()
    run.core.nodes_alive({"node-0"})
    assert run.phase(tickets[0]) is Phase.ABORTED
    assert run.core.held() == [promised]
    assert [info.node for info in promised.fragments] == [0, 1]


def test_a_node_that_dies_before_staging_ends_aborts_the_save(run: CoordinatedRun) -> None:
    stage(run, 1, nodes=1)
    run.core.nodes_alive({"node-0"})
    assert run.core.held() == []


def test_a_repeated_staging_report_changes_no_record(run: CoordinatedRun) -> None:
    """Ranks may have restored the save from memory, by the digest of this record; and the restores are reported by it."""
    restore = RestoreInfo(1, 5, 0.0, 2, 0.5, {"store": 9})
    run.core.restored([restore])
    tickets = stage(run, 1)
    (promised,) = run.core.held()
    run.clock.time += 5
    run.core.staged(tickets[1], part(tickets[1].node))  # the answer was lost
    for ticket in tickets:
        run.core.fragment(ticket, part(ticket.node))
    run.commit()
    assert [version.record for version in run.committer.catalog.versions()] == [promised]
    assert promised.restores == (restore,)


def test_only_the_newest_aborted_save_is_held(run: CoordinatedRun) -> None:
    """Saves in progress are listed as well."""
    for step in (1, 2):
        run.core.failed(stage(run, step)[0], "the store is full")
    assert [record.step for record in run.core.held()] == [2]
    stage(run, 3)
    assert [record.step for record in run.core.held()] == [3, 2]


def test_a_commit_removes_older_aborted_saves_from_the_list(run: CoordinatedRun) -> None:
    run.core.failed(stage(run, 1)[0], "the store is full")
    run.core.tick()
    assert [record.step for record in run.core.held()] == [1]
    assert run.core.in_use
    tickets = stage(run, 2)
    for ticket in tickets:
        run.core.fragment(ticket, part(ticket.node))
    run.commit()
    assert run.core.held() == []
    assert not run.core.in_use


def test_the_next_version_records_the_restores(run: CoordinatedRun) -> None:
    before, late = (RestoreInfo(1, 5, float(at), 2, 0.5, {"store": 9}) for at in range(2))
    run.core.restored([before])
    run.core.failed(stage(run, 1)[0], "the store is full")  # this save would have recorded the restore
    tickets = stage(run, 2)
    promised = run.core.held()[0]
    run.core.restored([late])  # the digest of the staged record is fixed already
    for of in (tickets, stage(run, 3)):
        for ticket in of:
            run.core.fragment(ticket, part(ticket.node))
    run.commit()
    records = [version.record for version in run.committer.catalog.versions()]
    assert [record.restores for record in records] == [(before,), (late,)]
    assert records[0] == promised


def test_a_dtensor_owned_by_two_ranks_makes_no_version(run: CoordinatedRun) -> None:
    def begin(rank: int, save: int = 1) -> Ticket:
        owned = ("model.norm", f"stage{rank}")
        return run.core.begin(begin_of(rank, 2, incarnation(f"a{rank}"), save, "node", 1, 60.0, 7, 7, owned_dtensors=owned))

    ticket = begin(0)
    assert begin(0) == ticket  # a repeated call
    assert run.phase(ticket) is Phase.GATHERING
    begin(1)
    assert "ranks 0 and 1 both hold 'model.norm'" in run.reason(ticket)
    run.core.save_failed(1, A1, 1, 1, run.reason(ticket))
    again = begin(0, save=2)
    begin(1, save=2)
    assert run.reason(again) == run.reason(ticket), "saving the step again has the same error"


def test_several_versions_are_deltas_to_one_base(run: CoordinatedRun) -> None:
    offered = []
    for step in range(1, 8):
        tickets = run.both(step, delta=2)
        base = tickets[0].base
        offered.append(base.id if base is not None and tickets[0].deltas else None)
        assert base == tickets[1].base
        assert base is None or base.id == max(id for id in (1, 4) if id < step), "unchanged chunks always refer to it"
        run.seal(tickets, () if offered[-1] is None else (offered[-1],))
        run.commit()
    assert offered == [None, 1, 1, None, 4, 4, None]
    assert run.both(9)[0].base is None, "no rank requested deltas"
    assert run.core.bases == {7}


def test_a_version_stored_whole_becomes_the_base(run: CoordinatedRun) -> None:
    run.seal(run.both(1, delta=5))
    run.commit()
    late, whole = run.both(2, delta=5), run.both(3, delta=5)
    run.seal(late)  # no node had the base in memory
    run.commit()
    assert run.core.bases == {1, 2}, "a save in progress may need version 1"
    run.seal(whole, (1,))
    run.commit()
    assert run.core.bases == {2}
    assert run.both(4, delta=5)[0].base.id == 2


def test_the_save_after_a_failed_commit_is_whole(run: CoordinatedRun) -> None:
    run.seal(run.both(1, delta=5))
    run.commit()
    tickets = run.both(2, delta=5)
    run.seal(tickets, (1,))
    run.core.settled(run.core.next_commit(), SaveFailed("what it is a delta to is gone"))
    assert run.both(3, delta=5)[0].base is None


def test_saves_in_progress_fail_after_a_rollback(run: CoordinatedRun) -> None:
    """The commit of the first save detects the rollback. No later chunk refers to a rolled-back version."""
    catalog = run.committer.catalog
    for step in (1, 2):
        run.seal(run.both(step))
        run.commit()
    run.seal(run.both(3, delta=5))
    run.commit()
    under_way, next_one = run.both(4, delta=5), run.both(5, delta=5)
    catalog.rollback(catalog.version(2))
    for tickets in (under_way, next_one):
        run.seal(tickets, (3,))
        attempt = run.core.next_commit()
        with pytest.raises(SaveFailed, match="rolled back since the save began") as refused:
            run.committer.commit(run.core.record(attempt))
        run.core.settled(attempt, refused.value)
        assert run.phase(tickets[0]) is Phase.ABORTED
    tickets = run.both(6, delta=5)
    assert tickets[0].base is None
    run.seal(tickets)
    run.commit()
    assert [version.step for version in catalog.versions()] == [1, 2, 6]
    assert run.both(7, delta=5)[0].base.id == 6


def test_a_rollback_noticed_by_a_restore_ends_the_deltas(run: CoordinatedRun) -> None:
    catalog = run.committer.catalog
    for step in (1, 2):
        run.seal(run.both(step, delta=5))
        run.commit()
    catalog.rollback(catalog.version(1))
    run.committer.notice(catalog.root())
    assert run.both(3, delta=5)[0].base is None
