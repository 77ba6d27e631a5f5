"""Only ranks and parts that have restored together make a version, also if a coordinator that knew better was restarted."""

from __future__ import annotations

import pytest
from helpers.begins import begin_of
from helpers.coordinated_run import CoordinatedRun, coordinated_run
from helpers.processes import incarnation

from raystow.orchestrator.coordinator.attempt import Phase
from raystow.storage.errors import SaveFailed
from raystow.storage.format.parts import part_number
from raystow.workers.protocol.messages import Ticket
from raystow.workers.protocol.messages.coordinator import NO_VERSION

BUFFER = part_number("buffer")


@pytest.fixture
def run() -> CoordinatedRun:
    return coordinated_run()


def begin_part(run: CoordinatedRun, process: str, past: str) -> Ticket | None:
    return run.core.begin_part(begin_of(BUFFER, 1, incarnation(process), 1, "node-2", 1, past=past))


@pytest.mark.parametrize(("ranks", "part"), [("second", "first"), ("second", NO_VERSION), (NO_VERSION, "first")])
def test_a_part_that_has_not_restored_with_the_ranks_is_refused(run: CoordinatedRun, ranks: str, part: str) -> None:
    """Another process has taken it, which has not yet called this coordinator."""
    tickets = [run.begin(rank, parts="buffer", past=ranks) for rank in (0, 1)]
    with pytest.raises(SaveFailed, match=r"part 'buffer', save of step 1: it has not restored together with the ranks"):
        begin_part(run, "former", part)
    assert run.phase(tickets[0]) is Phase.GATHERING
    assert begin_part(run, "successor", ranks) is not None


def test_ranks_that_have_not_restored_together_make_no_version(run: CoordinatedRun) -> None:
    ticket = run.begin(0, past="first")
    run.begin(1, past="second")
    assert "rank 1 has not restored together with the ranks that save this step" in run.reason(ticket)


@pytest.mark.parametrize(("ranks", "part"), [("first", ""), ("", "first"), ("", "")])
def test_those_that_never_restore_are_admitted(run: CoordinatedRun, ranks: str, part: str) -> None:
    ticket = run.begin(0, parts="buffer", past=ranks)
    run.begin(1, parts="buffer", past="first")
    assert begin_part(run, "buffer", part) is not None
    assert run.phase(ticket) is Phase.GATHERING
