"""A coordinator commits what ranks and declared parts have delivered, and names the part that it waits for."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.begins import begin_of
from helpers.coordinated_run import CoordinatedRun, coordinated_run
from helpers.processes import incarnation
from msgspec.structs import replace

from raystow.orchestrator.coordinator.attempt import Phase
from raystow.orchestrator.coordinator.requests import handle
from raystow.storage.errors import DeadlineExceeded, Fenced, ProtocolError, SaveFailed
from raystow.storage.format.parts import part_number
from raystow.storage.format.rank_spans import ranks_text
from raystow.storage.format.version_record import FragmentInfo, VersionRecord
from raystow.workers.protocol.messages import AskNextSave, Begin, JoinRun, NextSave, Ticket

BUFFER = part_number("buffer")
PARTS = "buffer"


@pytest.fixture
def run() -> CoordinatedRun:
    return coordinated_run()


def begin(step: int = 1, *, process: str = "buffer", save: int = 1, nbytes: int = 40) -> Begin:
    begun = begin_of(BUFFER, 1, incarnation(process), save, "node-2", step, 60.0, expected=11)
    return Begin(begun.node, begun.request, type(begun.contents)(0, 11, nbytes=nbytes))


def ask(first: int = 0, process: str = "buffer") -> AskNextSave:
    return AskNextSave(BUFFER, incarnation(process), 1, first, seconds=0.0, timeout=30.0)


def both(run: CoordinatedRun, step: int = 1, **fields: Any) -> list[Ticket]:
    return [run.begin(rank, step, parts=PARTS, **fields) for rank in (0, 1)]


def store(run: CoordinatedRun, tickets: list[Ticket]) -> None:
    for ticket in tickets:
        run.core.fragment(ticket, FragmentInfo(ticket.node, 0, "00" * 32, (ticket.node,), 0, 0, 0, packs=0))


def test_a_version_waits_for_its_part(run: CoordinatedRun) -> None:
    """The coverage sums of the part are counted with those of the ranks, and nothing of it is compared with theirs."""
    tickets = both(run)
    for rank, ticket in enumerate(tickets):
        run.core.finished(ticket, rank, 7 if rank == 0 else 0, [(1, 5)])
    assert run.phase(tickets[0]) is Phase.GATHERING
    ticket = run.core.begin_part(begin())
    assert ticket is not None
    run.core.finished(ticket, BUFFER, 11)
    store(run, [*tickets, ticket])
    attempt = run.core.next_commit()
    assert attempt is not None
    record = run.core.record(attempt)
    assert record.parts == {"buffer": 40}
    assert VersionRecord.load(record.dump(), record.key()) == record


def test_a_record_without_parts_has_no_such_field(run: CoordinatedRun) -> None:
    run.seal([run.begin(0), run.begin(1)])
    attempt = run.core.next_commit()
    assert attempt is not None
    assert b'"parts"' not in run.core.record(attempt).dump()


def test_a_part_waits_until_a_rank_begins(run: CoordinatedRun) -> None:
    """Only ranks open attempts, so that a part never delays the commit of a save without it."""
    answer = handle(run.core, begin())
    assert answer() is None
    assert not run.core.attempts
    tickets, changes = both(run), run.core.changes
    found = answer()
    assert isinstance(found, Ticket)
    assert (found.id, found.node) == (tickets[0].id, 2)
    assert answer() == found
    assert run.core.changes > changes
    assert run.core.begin_part(begin()) == found, "a repeated call changes nothing"


@pytest.mark.parametrize("step", [2, 1])
def test_a_part_is_refused_once_ranks_have_gone_on(run: CoordinatedRun, step: int) -> None:
    run.core.join(BUFFER, incarnation("buffer"))
    answer = handle(run.core, begin())
    ticket = run.begin(0, step, parts=PARTS)
    if step == 1:
        run.core.rank_disconnected(1, incarnation("a1"), "rank 1 died")  # not joined: changes nothing
        run.core.failed(ticket, "a disk is full")
    with pytest.raises(SaveFailed, match=r"part 'buffer', save of step 1: the ranks have (gone on|given it up).*in no version"):
        answer()


def test_a_part_that_no_rank_follows_is_named_at_its_deadline(run: CoordinatedRun) -> None:
    answer = handle(run.core, begin())
    assert answer() is None
    run.clock.time += 61
    changes = run.core.changes
    run.core.tick()
    assert run.core.changes > changes
    with pytest.raises(SaveFailed, match="no rank has begun to save it for 61 s"):
        answer()


def test_a_new_process_may_save_a_step_that_was_given_up(run: CoordinatedRun) -> None:
    """The ranks may save it again, too."""
    run.core.failed(run.begin(0, parts=PARTS), "a disk is full")
    run.clock.time += 1
    run.core.join(BUFFER, incarnation("buffer"))
    assert run.core.begin_part(begin()) is None


def test_a_part_is_told_the_cut_of_rank_0(run: CoordinatedRun) -> None:
    answer = handle(run.core, ask(3))
    run.begin(1, 3, parts=PARTS, cut={"samples": "1"})
    assert answer() is None
    run.begin(0, 3, parts=PARTS, cut={"samples": "5"})
    assert answer() == NextSave(3, True, {"samples": "5"})
    assert run.core.begin_part(begin(3)) is not None
    assert handle(run.core, ask(3))() is None, "it has begun to save this step"


@pytest.mark.parametrize("saving", [(), (1,)])
def test_a_save_that_a_part_skips_is_ended(run: CoordinatedRun, saving: tuple[int, ...]) -> None:
    """Its own save may have failed before the coordinator knew of it. ``saving``: it may also be on its way."""
    ticket = run.begin(0, 1, parts=PARTS)
    assert run.core.next_cut(replace(ask(1), saving=saving)) == NextSave(1, True, {})
    assert run.core.next_cut(replace(ask(2), saving=saving)) is None
    assert run.phase(ticket) is (Phase.GATHERING if saving else Phase.ABORTED)
    if not saving:
        with pytest.raises(SaveFailed, match="part 'buffer' waits for step 2, and has not saved this one"):
            run.core.attempt(ticket).result()


def test_a_part_does_not_wait_for_ever(run: CoordinatedRun) -> None:
    answer = handle(run.core, ask(3))
    assert answer() is None
    run.clock.time += 31
    run.core.tick()
    with pytest.raises(DeadlineExceeded, match="part 'buffer': the ranks have not begun to save step 3"):
        answer()
    assert handle(run.core, ask(3))() is None, "it may wait again"


def test_a_slow_part_is_named_at_half_and_at_the_deadline(run: CoordinatedRun) -> None:
    tickets = [run.begin(rank, parts=PARTS) for rank in (0, 1)]
    run.clock.time += 31
    run.core.tick()
    warning = run.core.late(tickets[0], 0)
    assert warning is not None
    assert warning.text.startswith("part 'buffer' (not started) has not called save for 31 s; ranks 0-1 wait")
    for rank, ticket in enumerate(tickets):
        run.core.finished(ticket, rank, 7 if rank == 0 else 0)
    run.clock.time += 30
    run.core.tick()
    assert run.reason(tickets[0]) == "part 'buffer' had not delivered their shards after 60 s"


def test_a_part_that_begins_and_is_slow_is_named_at_half(run: CoordinatedRun) -> None:
    """Also if half of the timeout is less than the usual 30 s without progress."""
    tickets = [run.core.begin(begin_of(rank, 2, incarnation(f"a{rank}"), 1, "node-0", 1, 20.0, parts=PARTS)) for rank in (0, 1)]
    assert run.core.begin_part(begin()) is not None
    for rank, ticket in enumerate(tickets):
        run.core.finished(ticket, rank, 0)
    run.clock.time += 11
    run.core.tick()
    warning = run.core.late(tickets[0], 0)
    assert warning is not None
    assert "part 'buffer' (buffer) has begun to save, but not delivered all data" in warning.text
    run.clock.time += 10
    run.core.tick()
    assert run.reason(tickets[0]) == "part 'buffer' had not delivered their shards after 20 s"


def test_a_part_that_dies_ends_the_saves_that_need_it(run: CoordinatedRun) -> None:
    run.core.join(BUFFER, incarnation("buffer"))
    needs = run.begin(0, 1, parts=PARTS)
    run.core.rank_disconnected(BUFFER, incarnation("buffer"), "part 'buffer' (process 7) went away before it saved")
    assert "part 'buffer' (process 7)" in run.reason(needs)
    other = run.begin(0, 2, save=2)
    run.core.rank_disconnected(BUFFER, incarnation("buffer"), "part 'buffer' (process 7) went away before it saved")
    assert run.phase(other) is Phase.GATHERING, "a save without parts"


def test_a_part_that_dies_after_it_has_delivered_counts(run: CoordinatedRun) -> None:
    tickets = both(run)
    ticket = run.core.begin_part(begin())
    assert ticket is not None
    run.core.rank_disconnected(BUFFER, incarnation("buffer"), "it went away")
    run.core.join(BUFFER, incarnation("buffer 2"))
    run.core.finished(ticket, BUFFER, 11)
    for rank, one in enumerate(tickets):
        run.core.finished(one, rank, 7 if rank == 0 else 0)
    assert run.phase(ticket) is Phase.SEALING


def test_a_part_that_is_restarted_can_still_deliver(run: CoordinatedRun) -> None:
    """Unlike a rank: the others go on without it, and save the same step."""
    run.core.join(BUFFER, incarnation("buffer"))
    ticket = both(run)[0]
    run.core.join(BUFFER, incarnation("buffer 2"))
    assert run.phase(ticket) is Phase.GATHERING
    assert run.core.begin_part(begin(process="buffer 2")) is not None
    run.core.join(BUFFER, incarnation("buffer 3"))
    assert run.reason(ticket) == "part 'buffer' was restarted"


def test_the_second_process_of_a_part_fences_the_first(run: CoordinatedRun) -> None:
    run.core.join(BUFFER, incarnation("buffer"))
    waits = handle(run.core, ask())
    run.core.join(BUFFER, incarnation("buffer 2"))
    for answer in waits, handle(run.core, begin()):
        with pytest.raises(Fenced, match=r"part 'buffer' of .*has taken up this part.*run each part once"):
            answer()


def test_a_part_delivers_a_step_once(run: CoordinatedRun) -> None:
    both(run)
    assert run.core.begin_part(begin()) is not None
    assert run.core.begin_part(begin(save=2)) is None, "it waits for another save of this step"


def test_ranks_declare_the_same_parts(run: CoordinatedRun) -> None:
    ticket = run.begin(0, parts=PARTS)
    run.begin(1, parts="rollouts")
    assert "rank 1 declares parts 'rollouts', other ranks 'buffer'" in run.reason(ticket)


def test_an_undeclared_part_is_refused(run: CoordinatedRun) -> None:
    run.begin(0)
    with pytest.raises(SaveFailed, match="part 'buffer': the ranks do not declare it"):
        run.core.begin_part(begin())


def test_the_world_size_is_that_of_ranks_alone(run: CoordinatedRun) -> None:
    run.core.join(BUFFER, incarnation("buffer"), 1)
    ticket = run.begin(0, parts=PARTS)
    run.core.join(BUFFER, incarnation("z, later"), 1)
    assert run.phase(ticket) is Phase.GATHERING
    assert run.begin(1, parts=PARTS).id == ticket.id


def test_a_node_is_reported_lost_with_its_part(run: CoordinatedRun) -> None:
    tickets = both(run)
    run.core.begin_part(begin())
    run.core.nodes_alive({"node-0", "node-1"})
    assert run.reason(tickets[0]) == "node node-2 died with the shards of part 'buffer'"


def test_the_number_of_a_part_follows_from_its_name(run: CoordinatedRun) -> None:
    handle(run.core, JoinRun(BUFFER, incarnation("buffer"), 1, "buffer"))
    for join in JoinRun(BUFFER, incarnation("b"), 1, "rollouts"), JoinRun(BUFFER, incarnation("b"), 1):
        if join.part:
            with pytest.raises(ProtocolError, match="another number"):
                handle(run.core, join)


def test_ranks_and_parts_are_named_together() -> None:
    rollouts = part_number("rollouts")
    assert ranks_text([BUFFER]) == "part 'buffer'"
    assert ranks_text([0, 1, BUFFER, rollouts]).startswith("ranks 0-1 and parts ")
    assert ranks_text([]) == "ranks "
