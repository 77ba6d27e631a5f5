"""After a restore, no rank or part adds to a save of the state before it: a version never has parts of two pasts."""

from __future__ import annotations

import pytest
from helpers.begins import begin_of
from helpers.builders import entry
from helpers.coordinated_run import CoordinatedRun, coordinated_run
from helpers.processes import incarnation
from msgspec.structs import replace

from raystow.orchestrator.coordinator.attempt import Phase
from raystow.storage.errors import SaveFailed
from raystow.storage.format.parts import part_number
from raystow.workers.protocol.messages import AskNextSave, Begin, RestoreVote, Ticket

BUFFER = part_number("buffer")


@pytest.fixture
def run() -> CoordinatedRun:
    run = coordinated_run()
    for rank in (0, 1):
        run.core.join(rank, incarnation(f"a{rank}"), 2)
    run.core.join(BUFFER, incarnation("buffer"))
    return run


def begin_of_part(step: int, *, process: str = "buffer", save: int = 1) -> Begin:
    return begin_of(BUFFER, 1, incarnation(process), save, "node-2", step, 60.0, expected=11)


def delivered(run: CoordinatedRun, step: int = 1) -> Ticket:
    """Both ranks deliver a save, for which the buffer has not begun."""
    tickets = [run.begin(rank, step, parts="buffer") for rank in (0, 1)]
    for rank, ticket in enumerate(tickets):
        run.core.finished(ticket, rank, 7 if rank == 0 else 0)
    return tickets[0]


def restart_ranks(run: CoordinatedRun) -> None:
    """The ranks have died, after they delivered what they saved, and other processes take them."""
    for rank in (0, 1):
        run.core.rank_disconnected(rank, incarnation(f"a{rank}"), f"rank {rank} died")
    run.clock.time += 1
    for rank in (0, 1):
        run.core.join(rank, incarnation(f"b{rank}"), 2)


def vote(rank: int, process: str, *, number: int = 1, saving: tuple[tuple[int, int], ...] = ()) -> RestoreVote:
    return RestoreVote(rank, 2, incarnation(process), number, 60.0, parts="buffer", saving=saving)


def next_save(run: CoordinatedRun, process: str) -> object:
    return run.core.next_cut(AskNextSave(BUFFER, incarnation(process), 1, 0, seconds=0.0, timeout=30.0))


@pytest.mark.parametrize("first", ["ranks", "part"])
def test_a_restarted_part_adds_to_no_save_of_ranks_before(run: CoordinatedRun, first: str) -> None:
    ticket = delivered(run)
    run.core.rank_disconnected(BUFFER, incarnation("another"), "not the one that has it")
    if first == "ranks":
        restart_ranks(run)
        assert run.phase(ticket) is Phase.GATHERING, "the part may deliver"
        run.core.join(BUFFER, incarnation("buffer again"))
    else:
        run.clock.time += 1
        run.core.join(BUFFER, incarnation("buffer again"))
        assert run.phase(ticket) is Phase.GATHERING, "the ranks go on"
        restart_ranks(run)
    assert run.phase(ticket) is Phase.ABORTED
    assert next_save(run, "buffer again") is None
    assert run.core.begin_part(begin_of_part(1, process="buffer again")) is None


def test_a_part_that_restores_adds_to_no_save_before(run: CoordinatedRun) -> None:
    """Its process lives, those of the ranks have died."""
    ticket = delivered(run)
    restart_ranks(run)
    run.core.restores(vote(BUFFER, "buffer"), exists=True)
    with pytest.raises(SaveFailed, match="part 'buffer' restores, and had not begun to save this step"):
        run.core.attempt(ticket).result()
    assert next_save(run, "buffer") is None


@pytest.mark.parametrize("number", [1, 2])
def test_a_rank_that_restores_ends_what_waits_for_it(run: CoordinatedRun, number: int) -> None:
    """A repeated vote ends nothing: the others may have gone on."""
    run.core.restores(vote(1, "a1"), exists=True)
    ticket = run.begin(0)
    run.core.restores(vote(1, "a1", number=number), exists=True)
    assert run.phase(ticket) is (Phase.ABORTED if number == 2 else Phase.GATHERING)


def test_a_restore_that_goes_on_after_a_coordinator_ends_nothing(run: CoordinatedRun) -> None:
    """The next coordinator has not seen the first vote of the rank, and the others may have restored and gone on."""
    ticket = run.begin(0)
    run.core.restores(replace(vote(1, "a1"), tried=entry(1)), exists=True)
    assert run.phase(ticket) is Phase.GATHERING


def test_a_save_that_is_on_its_way_is_not_ended(run: CoordinatedRun) -> None:
    ticket = delivered(run)
    run.core.restores(vote(BUFFER, "buffer", saving=((1, 1),)), exists=True)
    assert run.core.begin_part(begin_of_part(1)) is not None
    assert run.phase(ticket) is Phase.GATHERING


def test_a_part_that_starts_late_adds_to_the_first_version(run: CoordinatedRun) -> None:
    """The ranks have restored nothing, since there is nothing."""
    ticket = delivered(run)
    run.core.restores(vote(BUFFER, "buffer"), exists=False)
    assert run.core.begin_part(begin_of_part(1)) is not None
    assert run.phase(ticket) is Phase.GATHERING


def test_without_a_version_a_restarted_run_ends_saves_before(run: CoordinatedRun) -> None:
    ticket = delivered(run)
    restart_ranks(run)
    run.core.restores(vote(BUFFER, "buffer"), exists=False)
    assert run.phase(ticket) is Phase.ABORTED


def test_a_save_that_a_part_began_before_it_restored_is_refused(run: CoordinatedRun) -> None:
    """The ranks died before they began the step, and begin it after the restore."""
    assert run.core.begin_part(begin_of_part(3, save=5)) is None
    run.core.restores(vote(BUFFER, "buffer", saving=((5, 3),)), exists=True)
    ticket = delivered(run, 3)
    with pytest.raises(SaveFailed, match=r"part 'buffer', save of step 3: the part has restored a version since it began"):
        run.core.begin_part(begin_of_part(3, save=5))
    assert run.core.begin_part(begin_of_part(3, save=6)) is not None
    assert run.phase(ticket) is Phase.GATHERING
