"""The choice of the recorded steps to replay, and the reason why it ends."""

from __future__ import annotations

import pytest
from helpers.fake_clock import FakeClock

from raystow.orchestrator.journal.entry_plan import EntryPlan, continued, plan_entries
from raystow.workers.protocol.messages import EntryInfo, Generation

FIRST, SECOND = Generation("1", 1), Generation("2", 4)


def entry(step: int, rank: int = 0, *, ranks: int = 2, lineage: tuple[Generation, ...] = (FIRST,)) -> EntryInfo:
    return EntryInfo("repository", rank, ranks, step, step - 1, lineage, 100)


def steps(*numbers: int, ranks: int = 2, lineage: tuple[Generation, ...] = (FIRST,)) -> list[EntryInfo]:
    return [entry(step, rank, ranks=ranks, lineage=lineage) for step in numbers for rank in range(ranks)]


def reached(plan: EntryPlan) -> tuple[int, str]:
    return plan.step, plan.end


def test_a_plan_states_why_it_ends() -> None:
    assert reached(plan_entries(0, 2, {"a": steps(1, 2)})) == (2, "")
    assert reached(plan_entries(2, 2, {"a": steps(1, 2)})) == (2, "")
    one = [*steps(1), entry(2, 1), *steps(3)]
    assert reached(plan_entries(0, 2, {"a": one})) == (1, "no node has the entries of step 2 of ranks [0]")
    assert reached(plan_entries(0, 2, {"a": steps(2, 3)})) == (0, "no node has entries of the step after 0")
    apart = [entry(1), EntryInfo("repository", 1, 2, 2, 0, (FIRST,), 100)]
    assert reached(plan_entries(0, 2, {"a": apart})) == (0, "ranks have recorded different steps after step 0")


def test_another_number_of_ranks_gets_the_entries_of_all_ranks() -> None:
    """A rank replays the entries of all ranks that recorded a step, nearest first. If as many ranks recorded the step, it
    replays its own entry only.
    """
    held = {"a": steps(1, ranks=4), "b": steps(2, lineage=(FIRST, Generation("2", 2)))}
    plan = plan_entries(0, 2, held)
    assert plan.step == 2
    assert [(place.info.step, place.info.rank) for place in plan.entries(1, 2)] == [(1, 2), (1, 3), (1, 1), (1, 0), (2, 1)]
    refused = plan_entries(0, 2, held, "Muon mixes elements")
    assert reached(refused) == (0, "steps recorded by 4 ranks cannot be replayed by 2: Muon mixes elements")


def test_the_newest_generation_is_replayed() -> None:
    """The first generation recorded steps 4 and 5; the second generation repeated step 4."""
    held = {"a": steps(1, 2, 3, 4, 5), "b": steps(4, lineage=(FIRST, SECOND))}
    plan = plan_entries(0, 2, held)
    assert [place.info.generation for place in plan.entries(0, 2)] == [FIRST, FIRST, FIRST, SECOND]
    assert [place.nodes for place in plan.entries(0, 2)] == [("a",)] * 3 + [("b",)]


@pytest.mark.parametrize("found", [(1,), (2,)], ids=["continued", "not reached"])
def test_a_clock_set_back_does_not_make_a_generation_older(found: tuple[int, ...]) -> None:
    """The training goes on from what is found of three steps, when the clock was set back, and then all of them are found."""
    clock = FakeClock()
    clock.time += 3600
    first = continued(EntryPlan(0), 0, 0, clock)
    clock.time -= 3600
    plan = plan_entries(0, 2, {"a": steps(*found, lineage=first)})
    second = continued(plan, 0, plan.step, clock)
    repeated = steps(*range(plan.step + 1, 3), lineage=second)
    plan = plan_entries(0, 2, {"a": steps(1, 2, 3, lineage=first), "b": repeated})
    assert plan.lineage == second
    assert plan.step == 2


@pytest.mark.parametrize(("earlier", "later"), [(0, 1), (1, 11)])
def test_a_rollback_ends_all_generations(earlier: int, later: int) -> None:
    lineage = continued(EntryPlan(0), 0, 0, FakeClock(), earlier)
    held = {"a": steps(1, 2, lineage=lineage)}
    assert reached(plan_entries(0, 2, held, rollbacks=earlier)) == (2, "")
    after = plan_entries(0, 2, held, rollbacks=later)
    assert reached(after) == (0, "the steps after 0 were recorded before a rollback")
    (following,) = continued(after, 0, 0, FakeClock(), later)
    assert following > lineage[0]
    assert (lineage[0].rollbacks, following.rollbacks) == (earlier, later)
