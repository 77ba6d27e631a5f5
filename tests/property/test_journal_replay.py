"""A journal replays steps bit for bit; a replay that fails ends with the exact state of the last correct step."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers.journal_port import EntryBox, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

from raystow.orchestrator.journal.journal import Journal
from raystow.storage.runtime import metrics

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw-loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "muon": lambda p: torch.optim.Muon(p, lr=0.01),
}


class Net(nn.Module):
    """A model with matrices, vectors (unless ``only_matrices``), buffers that change in forward passes, an unused parameter."""

    def __init__(self, *, only_matrices: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(40, 120, bias=not only_matrices, dtype=dtype)
        self.norm = nn.BatchNorm1d(120, affine=not only_matrices, dtype=dtype)
        self.second = nn.Linear(120, 3, bias=False, dtype=dtype)
        self.unused = nn.Parameter(torch.ones(4, 4, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))


@dataclasses.dataclass
class Run:
    """A training of one process."""

    optimizer: str = "adamw-foreach"
    dtype: torch.dtype = torch.float32
    data: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net(only_matrices=self.optimizer == "muon", dtype=self.dtype)
        self.opt = OPTIMIZERS[self.optimizer]([{"params": list(self.model.first.parameters())}, {"params": self.rest()}])
        self.rate = 1.0

    def rest(self) -> list[nn.Parameter]:
        first = {id(one) for one in self.model.first.parameters()}
        return [one for one in self.model.parameters() if id(one) not in first]

    def step(self, number: int, *, nan: bool = False, clip: bool = False) -> None:
        generator = torch.Generator().manual_seed(1000 * self.data + number)
        x = torch.randn(16, 40, generator=generator).to(self.dtype)
        self.opt.zero_grad()
        loss = self.model(x).float().square().mean()
        (loss * float("nan") if nan else loss).backward()
        if clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        self.opt.step()
        group = self.opt.param_groups[number % 2]  # as a learning rate scheduler does
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] *= 0.97

    def snapshot(self) -> list[bytes]:
        return snapshot(self.model, self.opt)

    def load(self, other: Run) -> None:
        """Copy model and optimizer; ``Optimizer.load_state_dict`` would cast NAdam's ``mu_product`` to bfloat16."""
        self.model.load_state_dict(copy.deepcopy(other.model.state_dict()))
        for mine, theirs in zip(self.opt.param_groups, other.opt.param_groups, strict=True):
            mine.update({key: copy.deepcopy(value) for key, value in theirs.items() if key != "params"})
            for parameter, source in zip(mine["params"], theirs["params"], strict=True):
                if source in other.opt.state:
                    self.opt.state[parameter] = copy.deepcopy(other.opt.state[source])


def recorded(box: EntryBox, run: Run, steps: int, *, first: int = 1, **how: Any) -> list[list[bytes]]:
    """Record steps; return the state before the first step and the state after each step."""
    journal = box.journal(run.model, run.opt)
    journal.replay()
    states = [run.snapshot()]
    for number in range(first, first + steps):
        run.step(number, **how)
        journal.record(number, values={"step": number, "rng": torch.get_rng_state()})
        states.append(run.snapshot())
    journal.close()
    return states


def replayed(box: EntryBox, run: Run, *, base: int = -1) -> object:
    recorder = box.recorder(run.model, run.opt)
    recorder.restored(base, True)
    try:
        return Journal(recorder).replay()
    finally:
        recorder.close()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_are_replayed_bit_for_bit(optimizer: str) -> None:
    box = EntryBox()
    states = recorded(box, Run(optimizer), 5)
    again = Run(optimizer)
    values = replayed(box, again)
    assert isinstance(values, dict)
    assert values["step"] == 5
    assert torch.equal(values["rng"], torch.get_rng_state())
    assert again.snapshot() == states[-1]


@settings(max_examples=15)
@given(
    st.sampled_from(["sgd-momentum", "adamw-foreach", "adamw-fused", "nadam", "adafactor"]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.integers(1, 20),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_a_replay_continues_a_version(optimizer: str, dtype: torch.dtype, steps: int, base: int, nan: bool, clip: bool) -> None:
    """The gradients may be NaN or clipped, and the version may have been saved between two recorded steps."""
    base = min(base, steps - 1)
    box, run, kept = EntryBox(), Run(optimizer, dtype), Run(optimizer, dtype)
    recorder = box.recorder(run.model, run.opt)
    journal = Journal(recorder)
    journal.replay()
    for number in range(1, steps + 1):
        run.step(number, nan=nan and number == steps - 1, clip=clip)
        journal.record(number, values=number)
        if number == base:
            recorder.saved(number)
            kept.load(run)
    journal.close()
    assert replayed(box, kept, base=base if base else -1) == steps
    assert kept.snapshot() == run.snapshot()


def flip(box: EntryBox, step: int, at: int) -> None:
    """Change one bit of an entry."""
    info = box.info(step)
    data = bytearray(box.entries[info])
    data[at % len(data)] ^= 1 << at % 8
    box.entries[info] = bytes(data)


@settings(max_examples=20)
@given(st.integers(1, 6), st.integers(0, 1 << 30))
def test_a_flipped_bit_ends_the_replay_before_it(step: int, at: int) -> None:
    damaged, states = made()
    flip(damaged, step, at)
    again = Run()
    values = replayed(damaged, again)
    assert (values["step"] if isinstance(values, dict) else 0) == step - 1
    assert again.snapshot() == states[step - 1]


def made() -> tuple[EntryBox, list[list[bytes]]]:
    """Return a copy of the six steps that are recorded once, and their states."""
    box, states = recorded_once()
    copied = EntryBox()
    copied.entries = dict(box.entries)
    return copied, states


@functools.cache
def recorded_once() -> tuple[EntryBox, list[list[bytes]]]:
    box = EntryBox()
    return box, recorded(box, Run(), 6)


def test_a_missing_entry_ends_the_replay_before_it() -> None:
    box, states = made()
    del box.entries[box.info(4)]
    again = Run()
    replayed(box, again)
    assert again.snapshot() == states[3]


def test_entries_of_another_run_are_not_replayed(caplog: pytest.LogCaptureFixture) -> None:
    """The entries have the same step numbers but start from another state."""
    box, other = EntryBox(), EntryBox()
    recorded(box, Run(), 3)
    theirs = Run()
    with torch.no_grad():
        theirs.model.first.weight[0, 0] += 1
    recorded(other, theirs, 3)
    again = Run()
    before = again.snapshot()
    with caplog.at_level(logging.WARNING):
        assert replayed(other, again) is None
    assert again.snapshot() == before
    assert "is not the one that the entry starts from: first.weight differs" in caplog.text


@pytest.mark.parametrize("forged", [False, True])
def test_mixed_entries_end_the_replay(forged: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The entries are from two runs that start from the same state; ``forged`` makes their lineages equal."""
    (box, states), other = made(), EntryBox()
    recorded(other, Run(data=1), 6)
    theirs = other.info(4)
    del box.entries[box.info(4)]
    box.entries[replace(theirs, lineage=box.info(3).lineage) if forged else theirs] = other.entries[theirs]
    again = Run()
    with caplog.at_level(logging.WARNING):
        replayed(box, again)
    assert again.snapshot() == states[3]
    assert ("another entry" in caplog.text) == forged


def test_a_step_with_other_results_is_undone(caplog: pytest.LogCaptureFixture) -> None:
    """The optimizer of the restart computes other values: the state is reset to the version and the warning names the tensor."""
    box, _ = made()
    again = Run()
    again.opt.register_step_post_hook(lambda *_: again.model.second.weight.data.mul_(1.0 + 1e-6))
    before = again.snapshot()
    with caplog.at_level(logging.WARNING):
        assert replayed(box, again) is None
    assert again.snapshot() == before
    assert "the replay ends before step 1: the state differs from the recorded one in second.weight" in caplog.text


def test_a_replay_ends_before_the_first_differing_step() -> None:
    box, states = made()
    again, calls = Run(), 0

    def disturb(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            again.model.unused.data[0, 0] += 1

    again.opt.register_step_post_hook(disturb)
    assert isinstance(values := replayed(box, again), dict)
    assert values["step"] == 3
    assert again.snapshot() == states[3]


def test_a_repeated_step_replaces_the_earlier_one() -> None:
    """A run restarts at step 3, repeats step 4 with other data, and restarts again: the first step 4 is not replayed."""
    box, _ = made()
    for step in (5, 6):
        del box.entries[box.info(step)]
    hidden = box.entries.pop(first := box.info(4))
    second = Run(data=1)
    states = recorded(box, second, 1, first=4)
    box.entries[first] = hidden
    third = Run(data=1)
    replayed(box, third)
    assert third.snapshot() == states[-1]
    assert [info.step for info in box.entries].count(4) == 2


def test_nothing_is_recorded_after_a_gap(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording resumes at the next save; the training continues, and each unrecorded step is counted."""
    counted = Counter[metrics.Metric]()
    monkeypatch.setattr(metrics, "_recorder", lambda metric, value, tags: counted.update([metric]))
    box, run = EntryBox(), Run()
    box.refuse = {3}
    recorder = box.recorder(run.model, run.opt)
    journal = Journal(recorder)
    journal.replay()
    for number in range(1, 8):
        run.step(number)
        journal.record(number)
        if number == 6:
            assert journal.save_advised
            recorder.saved(6)
            at_six = Run()
            at_six.load(run)
    journal.close()
    assert not journal.save_advised
    assert "step 3 is not recorded" in caplog.text
    assert counted[metrics.UNRECORDED] >= 3  # steps 3, 5 and 6; step 4 may already have been queued
    steps = box.steps()
    assert steps[:2] == [1, 2]
    assert steps[-1] == 7
    assert not {3, 6} & {*steps}
    replayed(box, at_six, base=6)
    assert at_six.snapshot() == run.snapshot()


def test_entries_of_another_attempt_are_not_replayed(caplog: pytest.LogCaptureFixture) -> None:
    """The other attempt did not save that step; its state differs in one element, which the digest sample may omit."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(1, 20_000)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    box, (model, optimizer) = EntryBox(), build()
    journal = box.journal(model, optimizer)
    journal.replay()
    for number in (1, 2, 3):
        if number == 3:
            at_two = copy.deepcopy(model.state_dict())
        model(torch.ones(1, 1)).square().sum().backward()
        optimizer.step()
        journal.record(number)
    journal.close()
    for place in range(0, 20_000, 2_500):
        again, optimizer = build()
        again.load_state_dict(at_two)
        again.bias.data[place] += 1
        before = snapshot(again, optimizer)
        recorder = box.recorder(again, optimizer)
        recorder.restored(2, True)
        assert Journal(recorder).replay() is None
        recorder.close()
        assert snapshot(again, optimizer) == before
    assert "was not saved by the run that recorded the step after it" in caplog.text


@pytest.mark.parametrize("skipped", [1, 3])
def test_a_skipped_step_of_a_scaler_is_replayed(skipped: int) -> None:
    """A fused optimizer receives the scale and skips the step itself; other optimizers are not called."""
    for name in ("adamw-fused", "adamw-loop"):
        box, run = EntryBox(), Run(name)
        journal = box.journal(run.model, run.opt)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        journal.replay()
        for number in range(1, 6):
            run.opt.zero_grad()
            loss = run.model(torch.randn(16, 40)).square().mean() * (float("inf") if number == skipped else 1.0)
            scaler.scale(loss).backward()
            scaler.step(run.opt)
            scaler.update()
            journal.record(number, values=scaler.state_dict())
        journal.close()
        again = Run(name)
        assert replayed(box, again) == scaler.state_dict()
        assert again.snapshot() == run.snapshot(), name


def test_steps_of_closures_and_two_optimizers_are_replayed() -> None:
    """The journal records the gradients that a closure computes, and two optimizers step between two records."""
    box = EntryBox()

    def build() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        return model, [torch.optim.Adam(model[0].parameters()), torch.optim.SGD(model[1].parameters(), lr=0.1)]

    model, optimizers = build()
    journal = box.journal(model, *optimizers)
    journal.replay()
    for number in range(1, 4):

        def closure() -> torch.Tensor:
            model.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            return loss

        for optimizer in optimizers:
            optimizer.step(closure)
        journal.record(number)
    journal.close()
    again, theirs = build()
    other = box.journal(again, *theirs)
    other.replay()
    other.close()
    assert snapshot(again, *theirs) == snapshot(model, *optimizers)


def test_master_weights_are_copied_after_each_step() -> None:
    """Mixed precision: the optimizer has a float32 copy of bfloat16 weights; float32 gradients are stored as bfloat16."""
    box = EntryBox()

    def build() -> tuple[nn.Module, list[nn.Parameter], torch.optim.Optimizer, Callable[[], None]]:
        torch.manual_seed(0)
        model = nn.Linear(200, 300, dtype=torch.bfloat16)
        master = [nn.Parameter(one.detach().float()) for one in model.parameters()]

        def sync() -> None:
            with torch.no_grad():
                for weight, copied in zip(model.parameters(), master, strict=True):
                    weight.copy_(copied)

        return model, master, torch.optim.AdamW(master, lr=0.01), sync

    model, master, optimizer, sync = build()
    journal = box.journal(model, optimizer)
    journal.replay()
    for number in range(1, 5):
        model.zero_grad()
        model(torch.randn(8, 200, dtype=torch.bfloat16)).float().square().mean().backward()
        for copied, weight in zip(master, model.parameters(), strict=True):
            copied.grad = weight.grad.float()
        nn.utils.clip_grad_norm_(master, 1e-3)
        optimizer.step()
        sync()
        journal.record(number)
    journal.close()
    again, _, theirs, sync_again = build()
    other = box.journal(again, theirs)
    other.replay(after_step=sync_again)
    other.close()
    assert snapshot(again, theirs) == snapshot(model, optimizer)
    state = 14 * sum(one.numel() for one in master)
    assert box.info(4).size < 0.2 * state  # the model is small, so headers are a large part


def test_steps_without_records_are_not_collected(caplog: pytest.LogCaptureFixture) -> None:
    """A loop that never calls ``record`` uses bounded memory."""
    box, run = EntryBox(), Run()
    journal = box.journal(run.model, run.opt)
    journal.replay()
    for number in range(1, 40):
        run.step(number)
    assert journal.save_advised
    assert "record() was not called" in caplog.text
    journal.record(40)
    journal.close()
    assert box.steps() == []


@pytest.mark.parametrize("optimizer", ["adamw-foreach", "muon"])
def test_another_number_of_ranks_replays_elementwise_steps(optimizer: str, caplog: pytest.LogCaptureFixture) -> None:
    """The log says why other steps are not replayed. ``integration/test_journal_ranks.py`` tests parts of parameters."""
    box, before = EntryBox(), Run(optimizer).snapshot()
    states = recorded(box, Run(optimizer), 3)
    runs = [Run(optimizer), Run(optimizer)]
    journals = [box.journal(run.model, run.opt, rank=rank, world_size=2) for rank, run in enumerate(runs)]
    with ThreadPoolExecutor(2) as pool, caplog.at_level(logging.WARNING):
        values = [*pool.map(lambda journal: journal.replay(), journals)]
    for journal in journals:
        journal.close()
    if optimizer == "muon":
        assert values == [None, None]
        assert "steps recorded by 1 ranks cannot be replayed by 2: Muon is not known to act element by element" in caplog.text
    assert all(run.snapshot() == (before if optimizer == "muon" else states[-1]) for run in runs)


def test_all_ranks_end_at_the_last_step_that_all_reach() -> None:
    """One rank lacks the last entry and another rank computes other values in step 3: all ranks end at step 2."""
    box, states = EntryBox(), dict[int, list[list[bytes]]]()
    runs = [Run(), Run(), Run()]

    def record(rank: int) -> None:
        journal = box.journal(runs[rank].model, runs[rank].opt, rank=rank, world_size=3)
        journal.replay()
        states[rank] = [runs[rank].snapshot()]
        for number in range(1, 6):
            runs[rank].step(number)
            journal.record(number, values=number)
            states[rank].append(runs[rank].snapshot())
        journal.close()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(record, range(3)))
        del box.entries[box.info(5, rank=0)]
        again, calls = [Run(), Run(), Run()], 0

        def disturb(*_: object) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                again[1].model.unused.data[0, 0] += 1

        again[1].opt.register_step_post_hook(disturb)
        journals = [box.journal(run.model, run.opt, rank=rank, world_size=3) for rank, run in enumerate(again)]
        assert [*pool.map(lambda journal: journal.replay(), journals)] == [2, 2, 2]
    for rank, run in enumerate(again):
        assert run.snapshot() == states[rank][2]
        journals[rank].close()
