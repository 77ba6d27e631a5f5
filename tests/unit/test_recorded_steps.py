"""A journal of steps in one process, and the agreement of ranks on a replay."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from typing import Any, cast

import pytest
import torch
from fake_clock import FakeClock
from journal_port import EntryBox, snapshot
from msgspec.structs import replace
from torch import nn

from raystow.orchestrator.journal.entry_file import JournalEntry, parse
from raystow.orchestrator.journal.journal import Journal
from raystow.orchestrator.journal.replay import Replayer
from raystow.orchestrator.journal.rounds import JournalRounds
from raystow.orchestrator.journal.step_hooks import StepHooks
from raystow.orchestrator.journal.step_reader import DecodedStep, StepReader
from raystow.orchestrator.journal.tracked_state import TrackedState
from raystow.storage.errors import ClusterError, Damaged, StateError
from raystow.storage.log import about
from raystow.workers.protocol.messages import START, JournalVote


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
    with opened(box, training) as journal:
        journal.replay()
        training.steps(journal, range(1, 5))
        journal.saved(4)
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
        replayer._check_before(DecodedStep(entry, {0: entry, 1: other}, None, [], [], {}), START)


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
    old, new = (JournalVote(rank, ranks, "", 1, 10.0, START) for rank, ranks in ((0, 4), (1, 3)))
    round = rounds.vote(old, dict)
    waiting = rounds.vote(new, dict)
    assert round.answers(old)
    with pytest.raises(ClusterError, match="3 ranks have begun another replay"):
        round.answer(old)
    assert not waiting.answers(new)
