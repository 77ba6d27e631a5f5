"""A journal of steps in one process, and the agreement of ranks on a replay."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from typing import Any, cast

import pytest
import torch
from helpers.fake_clock import FakeClock
from helpers.journal_port import EntryBox, snapshot
from helpers.processes import incarnation
from helpers.state_equality import same
from msgspec.structs import replace
from torch import nn
from torchmetrics import MeanMetric

from raystow.orchestrator.journal.entry_file import JournalEntry, parse
from raystow.orchestrator.journal.journal import Journal
from raystow.orchestrator.journal.replay import Replayer
from raystow.orchestrator.journal.rounds import JournalRounds
from raystow.orchestrator.journal.step_hooks import StepHooks
from raystow.orchestrator.journal.step_reader import DecodedStep, StepReader
from raystow.orchestrator.journal.tracked_state import TrackedState
from raystow.storage.errors import ClusterError, Damaged, DeadlineExceeded, RankRestarted, StateError
from raystow.storage.log import about
from raystow.storage.runtime.clock import SYSTEM
from raystow.workers.protocol.messages import START, EntryInfo, Generation, JournalVote, RankReading


class Training:
    """A model of one layer and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def grow(self) -> None:
        torch.manual_seed(1)
        self.model.insert(0, nn.Sequential(nn.Linear(8, 4000), nn.Linear(4000, 8)))
        self.optimizer.add_param_group({"params": list(self.model[0].parameters())})

    def steps(self, journal: Journal, numbers: range) -> None:
        for number in numbers:
            self.optimizer.zero_grad()
            self.model(torch.full((4, 8), float(number))).square().mean().backward()
            self.optimizer.step()
            journal.record(number, number)

    def snapshot(self) -> list[bytes]:
        return snapshot(self.model, self.optimizer)


@contextlib.contextmanager
def opened(box: EntryBox, training: Training) -> Any:
    with contextlib.closing(box.journal(training.model, training.optimizer)) as journal:
        yield journal


def recorded(box: EntryBox, step: int) -> JournalEntry:
    return parse(box.info(step), memoryview(box.entries[box.info(step)]))


def test_digests_of_all_bytes_are_counted_from_the_last_save() -> None:
    """So that all ranks take them at the same steps, also if one has lost entries before."""
    box, training = EntryBox(), Training()
    box.refuse = {2}
    recorder = box.recorder(training.model, training.optimizer)
    with contextlib.closing(Journal(recorder)) as journal:
        journal.replay()
        training.steps(journal, range(1, 5))
        recorder.saved(4)
        training.steps(journal, range(5, 22))
    assert [step for step in range(5, 22) if recorded(box, step).header.whole] == [20]


def test_ranks_with_digests_of_different_kinds_end_a_replay() -> None:
    box, training = EntryBox(), Training()
    with opened(box, training) as journal:
        journal.replay()
        training.steps(journal, range(1, 2))
    entry = recorded(box, 1)
    other = dataclasses.replace(entry, header=replace(entry.header, whole=True))
    state, none = TrackedState(training.model, [training.optimizer]), cast(StepReader, None)
    log = about(logging.getLogger(__name__))
    replayer = Replayer(state, StepHooks(state, lambda _: None), none, after_step=None, base=START, log=log)
    with pytest.raises(Damaged, match="and others of a sample"):
        replayer.check_before(DecodedStep(entry, {0: entry, 1: other}, None, [], [], {}, {}), START)


def test_parameters_that_join_the_model_late_are_replayed() -> None:
    """They come before others in the model, and are so large that their digest is that of a sample."""
    box, training, again = EntryBox(), Training(), Training()
    with opened(box, training) as journal:
        journal.replay()
        training.grow()
        training.steps(journal, range(1, 4))
    again.grow()
    with opened(box, again) as journal:
        assert journal.replay() == 3
    assert again.snapshot() == training.snapshot()


def test_hyper_parameters_that_cannot_be_copied_stay() -> None:
    box, training, again = EntryBox(), Training(), Training()
    for one in (training, again):
        one.optimizer.param_groups[0]["lock"] = threading.Lock()
    lock = again.optimizer.param_groups[0]["lock"]
    with opened(box, training) as journal:
        journal.replay()
        training.steps(journal, range(1, 3))
    again.optimizer.register_step_post_hook(lambda *_: again.model[0].weight.data.mul_(2))  # the replay goes back
    with opened(box, again) as journal:
        assert journal.replay() is None
    assert again.optimizer.param_groups[0]["lock"] is lock


def test_a_closed_journal_records_nothing() -> None:
    training = Training()
    with opened(EntryBox(), training) as journal:
        journal.replay()
    with pytest.raises(StateError, match="the journal is closed"):
        journal.record(1)


def test_another_number_of_ranks_ends_an_open_replay() -> None:
    """A rank that waits for others learns it."""
    rounds = JournalRounds(FakeClock())
    old, new = (JournalVote(rank, ranks, incarnation(""), 1, 10.0, START) for rank, ranks in ((0, 4), (1, 3)))
    round = rounds.vote(old, dict)
    waiting = rounds.vote(new, dict)
    assert round.answers(old)
    with pytest.raises(ClusterError, match="3 ranks have begun another replay"):
        round.answer(old)
    late = replace(old, rank=3, reached=5)  # of a rank that has replayed on while the coordinator was restarted
    with pytest.raises(ClusterError, match="3 ranks have begun another replay"):
        rounds.vote(late, dict).answer(late)
    assert not waiting.answers(new)


class Agreeing:
    """Two ranks that have begun a replay of the steps 1 to 5, after which others wait 60 s for them."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.rounds = JournalRounds(self.clock)
        lineage = (Generation("g", 0),)
        held = [EntryInfo("r", rank, 2, step, step - 1, lineage) for rank in range(2) for step in range(1, 6)]
        for rank in range(2):
            self.round = self.rounds.vote(self.of(rank), lambda: {"node": held})
        assert self.round.answer(self.of(0)).step == 5

    def of(self, rank: int, reached: int | None = None) -> JournalVote:
        return JournalVote(rank, 2, incarnation(f"p{rank}"), 1, 60.0, 0, reached)

    def vote(self, rank: int, reached: int) -> JournalVote:
        vote = self.of(rank, reached)
        assert self.rounds.vote(vote, dict) is self.round
        return vote


def test_ranks_wait_for_a_rank_that_replays_on() -> None:
    """Votes that the waiting rank repeats meanwhile are no reason to wait longer."""
    run = Agreeing()
    waiting = run.vote(0, 5)
    for _ in range(9):
        run.clock.time += 40
        run.rounds.reading(RankReading(1, incarnation("p1"), 1, 60.0))
        run.rounds.tick()
        run.vote(0, 5)
        assert not run.round.answers(waiting)
    for other in (
        RankReading(1, incarnation("other"), 1, 60.0),
        RankReading(1, incarnation("p1"), 2, 60.0),
        RankReading(0, incarnation("p0"), 1, 60.0),
    ):
        run.rounds.reading(other)
    run.clock.time += 61
    run.rounds.tick()
    with pytest.raises(DeadlineExceeded, match=r"ranks \[1\] did not go on with their replay"):
        run.round.answer(waiting)


def test_ranks_wait_for_a_rank_that_replays_less_once_more() -> None:
    run = Agreeing()
    again, waiting = run.vote(0, 5), run.vote(1, 3)
    assert run.round.answer(again).step == 3
    run.clock.time += 40
    run.rounds.reading(RankReading(0, incarnation("p0"), 1, 60.0))
    run.clock.time += 40
    run.rounds.tick()
    assert run.rounds.vote(waiting, dict) is run.round
    assert run.round.answer(run.vote(0, 3)).agreed


def test_a_repeated_vote_is_answered_after_the_replay() -> None:
    """The last rank has finished when another rank is about to repeat its vote, or the replay has failed."""
    run = Agreeing()
    waiting = run.vote(0, 5)
    run.vote(1, 5)
    run.vote(0, 5)
    assert run.round.answer(waiting).agreed
    run = Agreeing()
    waiting = run.vote(0, 5)
    run.rounds.left(1, incarnation("new"))
    run.vote(0, 5)
    with pytest.raises(ClusterError, match="rank 1 was restarted"):
        run.round.answer(waiting)


def test_a_restarted_coordinator_lets_the_ranks_begin_again() -> None:
    """Rank 0 has waited for the plan when it was restarted, and rank 1 had it already: there may be another one now. Rank 0 waits
    while rank 1 replays on by the old plan."""
    run = Agreeing()
    rounds = JournalRounds(run.clock)
    round, old = rounds.vote(run.of(0), dict), run.of(1, 5)
    for _ in range(9):
        run.clock.time += 40
        rounds.reading(RankReading(1, incarnation("p1"), 1, 60.0))
        rounds.tick()
    assert not round.answers(run.of(0))
    with pytest.raises(RankRestarted, match="the coordinator was restarted"):
        rounds.vote(old, dict).answer(old)
    assert not round.answers(run.of(0))
    again = replace(run.of(1), number=2)
    assert rounds.vote(again, dict) is round
    assert round.answer(again).step == round.answer(run.of(0)).step == 0
    for vote in (replace(again, reached=0), run.of(0, 0)):
        assert rounds.vote(vote, dict) is round
    assert round.answer(run.of(0, 0)).agreed


@pytest.mark.parametrize("lost", [False, True])
def test_a_replay_survives_a_restart_of_the_coordinator(lost: bool) -> None:
    """It may find fewer entries afterwards: then the state is the one after the last of them."""
    box, training, again = EntryBox(), Training(), Training()
    with opened(box, training) as journal:
        journal.replay()
        training.steps(journal, range(1, 3))
        expected = training.snapshot()
        training.steps(journal, range(3, 5))

    def restart(*_: object) -> None:
        hook.remove()
        box.rounds = JournalRounds(SYSTEM)
        for info in [box.info(step) for step in (3, 4)] if lost else []:
            del box.entries[info]

    with opened(box, again) as journal:
        hook = again.optimizer.register_step_post_hook(restart)
        assert journal.replay() == (2 if lost else 4)
    assert again.snapshot() == (expected if lost else training.snapshot())


def test_a_rank_tells_the_others_that_it_replays_on() -> None:
    """Not for each step, but with a ``timeout`` of 0."""
    counts = []
    for timeout in (0.0, 600.0):
        box, training, again, told = EntryBox(), Training(), Training(), list[RankReading]()
        box.rounds.reading = told.append  # type: ignore[method-assign]
        with opened(box, training) as journal:
            journal.replay()
            training.steps(journal, range(1, 4))
        with contextlib.closing(box.journal(again.model, again.optimizer, timeout=timeout)) as journal:
            assert journal.replay() == 3
        counts.append(len(told))
    assert counts == [9, 0], "before each step, when it is fetched, and when it was read"


class Scaled(nn.Module):
    """A module with state that is no parameter or buffer, like float8 scales."""

    def __init__(self) -> None:
        super().__init__()
        self.history, self.largest = torch.zeros(1), 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.history = torch.cat([self.history, inputs.detach().abs().amax()[None]])
        self.largest = float(self.history.max())
        return inputs / self.largest

    def get_extra_state(self) -> dict[str, Any]:
        return {"history": self.history, "largest": self.largest}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.history, self.largest = state["history"], state["largest"]


@pytest.mark.parametrize("compiled", [False, True])
def test_other_state_of_modules_is_replayed(compiled: bool) -> None:
    """Metrics in a model, and the extra state of its modules."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(8, 8), Scaled()), "loss": MeanMetric()})
        model["loss"].persistent(True)
        return model, torch.optim.Adam(model.parameters())

    box, (model, optimizer) = EntryBox(), build()
    journal = box.journal(model, optimizer)
    journal.replay()
    for number in range(1, 4):
        loss = model["net"](torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        model["loss"].update(loss.detach())
        journal.record(number)
    journal.close()
    again, other = build()
    journal = box.journal(torch.compile(again, backend="eager") if compiled else again, other)
    journal.replay()
    journal.close()
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    assert model["loss"].mean_value > 0
