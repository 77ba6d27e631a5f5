"""Parts restore the version that the ranks restore."""

from __future__ import annotations

import pytest
from helpers.processes import incarnation
from helpers.restoring_run import RestoringRun

from raystow.orchestrator.restore.name_patterns import NameRules
from raystow.orchestrator.restore.round import RestoreRound
from raystow.storage.errors import DeadlineExceeded, RankRestarted, StateError
from raystow.storage.format.parts import part_number
from raystow.storage.format.root import Entry
from raystow.workers.protocol.messages import RestoreVote

BUFFER = part_number("buffer")
PARTS = {"parts": "buffer"}


@pytest.fixture
def run() -> RestoringRun:
    return RestoringRun()


def part(run: RestoringRun, tried: Entry | None = None, damage: str = "", *, process: str = "buffer") -> RestoreRound:
    return run.rounds.vote(RestoreVote(BUFFER, 1, incarnation(process), 1, 60.0, tried, damage, node="node c"))


@pytest.mark.parametrize("order", ["p01", "0p1", "01p"])
def test_ranks_and_parts_restore_one_version(run: RestoringRun, order: str) -> None:
    (old,) = run.commit(1)
    rounds = [part(run) if who == "p" else run.vote(int(who), node="node a", **PARTS) for who in order[:2]]
    assert not rounds[0].answers(None)
    run.commit(1)
    rounds += [part(run) if order[2] == "p" else run.vote(int(order[2]), node="node a", **PARTS)]
    assert len({*map(id, rounds)}) == 1
    assert rounds[0].answer(None) == old
    assert rounds[0].group.nodes == ("node a", "node c")
    run.vote(0, old, **PARTS)
    run.vote(1, old, **PARTS)
    assert not rounds[0].answers(old), "the part has not restored it yet"
    part(run, old)
    assert rounds[0].answers(old)
    assert rounds[0].done


def test_all_fall_back_from_a_part_that_is_damaged(run: RestoringRun) -> None:
    old, new = run.commit(2)
    votes = run.vote(0, **PARTS), run.vote(1, **PARTS), part(run)
    for one in run.vote(0, new, **PARTS), run.vote(1, new, **PARTS), part(run, new, "pack 3 is gone"):
        assert one is votes[0]
    assert votes[0].answer(new) == old


def test_names_of_a_part_are_compared_with_no_rank(run: RestoringRun) -> None:
    (entry,) = run.commit(1)
    round = run.vote(0, names=5, **PARTS)
    part(run)
    run.vote(1, names=5, **PARTS)
    assert round.alike
    part(run, entry)
    assert not round.has_compared, "its vote does not say that names of the ranks are used"


def test_a_part_that_does_not_call_is_named(run: RestoringRun) -> None:
    run.commit(1)
    round = run.vote(0, **PARTS)
    run.vote(1, **PARTS)
    run.clock.time += 61
    run.rounds.tick()
    with pytest.raises(
        DeadlineExceeded, match=r"part 'buffer' \(not started\) has not called restore for 61 s; ranks 0-1 gave up"
    ):
        round.answer(None)


def test_a_part_that_is_restarted_lets_all_begin_again(run: RestoringRun) -> None:
    run.commit(1)
    round = part(run)
    run.vote(0, **PARTS)
    run.rounds.left(BUFFER, incarnation("later"))
    with pytest.raises(RankRestarted, match="part 'buffer' was restarted"):
        round.answer(None)


def test_an_undeclared_part_is_refused_and_the_ranks_go_on(run: RestoringRun) -> None:
    (entry,) = run.commit(1)
    round = run.vote(0)
    with pytest.raises(StateError, match="part 'buffer': the ranks do not declare it"):
        part(run)
    run.vote(1)
    assert round.answer(None) == entry


def test_ranks_that_declare_different_parts_restore_nothing(run: RestoringRun) -> None:
    run.commit(1)
    round = run.vote(0, **PARTS)
    run.vote(1, parts="rollouts")
    with pytest.raises(StateError, match="different parts"):
        round.answer(None)


def test_an_empty_repository_keeps_no_part_waiting(run: RestoringRun) -> None:
    assert part(run).answer(None) is None
    assert run.vote(0, **PARTS).answer(None) is None


def test_patterns_of_a_part_match_its_names_only() -> None:
    rules = NameRules.of(True, "opt*", ("*",), part="buffer")
    assert "[part buffer].optim.m" in rules.missing
    assert "[part buffer].w" not in rules.missing
    assert "optim.m" not in rules.missing
    assert rules.unused.everything
