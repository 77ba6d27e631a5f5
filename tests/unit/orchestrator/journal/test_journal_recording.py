"""Recording never fails the training, and keeps no memory that the training has replaced."""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from helpers.journal_port import BoxPort, EntryBox, snapshot
from torch import nn

from raystow.orchestrator.journal.journal import Journal
from raystow.orchestrator.journal.recorder import StepRecorder
from raystow.orchestrator.journal.state_digests import Digester
from raystow.orchestrator.journal.tracked_state import TrackedState
from raystow.storage.errors import ClusterError, StateError
from raystow.workers.protocol.messages import EntryKept, Generation, JournalChoice, JournalVote


class Run:
    """A training of one process."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(40, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        self.model(torch.randn(16, 40, generator=generator)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("part", ["_buffers", "digester"])
def test_an_unexpected_error_loses_steps_until_the_next_save(
    part: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, run = EntryBox(), Run()
    recorder = box.recorder(run.model, run.optimizer)
    journal = Journal(recorder)
    journal.replay()
    for number in range(1, 5):
        with monkeypatch.context() as patch:
            if number == 2:
                patch.setattr(recorder, part, SimpleNamespace(begin=lambda: None))
            run.step(number)
            journal.record(number)
        if number == 3:
            assert journal.save_advised
            recorder.saved(3)
            saved = copy.deepcopy(run)
    journal.close()
    assert box.steps() == [1, 4]
    assert "2 is not recorded" in caplog.text or "step after 1 is not recorded" in caplog.text
    assert "AttributeError" in caplog.text, "the traceback is logged"
    again = box.recorder(saved.model, saved.optimizer)
    again.restored(3, True)
    Journal(again).replay()
    again.close()
    assert snapshot(saved.model, saved.optimizer) == snapshot(run.model, run.optimizer)


REFUSED = EntryKept(1, 0, "the memory for entries is full")


@contextlib.contextmanager
def recording(box: EntryBox, run: Run) -> Iterator[StepRecorder]:
    """Yield the recorder of a journal that has recorded step 1."""
    with contextlib.closing(box.recorder(run.model, run.optimizer)) as recorder:
        journal = Journal(recorder)
        journal.replay()
        run.step(1)
        journal.record(1)
        journal.flush()
        yield recorder


def test_a_save_during_a_refused_entry_restarts_recording() -> None:
    """The thread that learns of the refusal is about to end the recording until the next save, when that save begins."""
    box, run = EntryBox(), Run()
    with recording(box, run) as recorder:
        save = threading.Thread(target=recorder.saved, args=(1,))

        def save_now(*_: object, **__: object) -> None:
            save.start()
            save.join(0.2)  # it waits for the other thread

        recorder.log = SimpleNamespace(error=save_now)  # type: ignore[assignment]
        recorder.kept(REFUSED)
        save.join()
        assert not recorder.save_advised
        run.step(2)
        recorder.record(2, "")
    assert box.steps() == [1, 2]


@pytest.mark.parametrize("late", [False, True], ids=["lost before", "lost after"])
@pytest.mark.parametrize("newer", [False, True], ids=["alone", "with a newer save"])
def test_a_failed_save_after_a_lost_entry_ends_recording(late: bool, newer: bool) -> None:
    """The entries that follow cannot be replayed from an older version."""
    box, run = EntryBox(), Run()
    with recording(box, run) as recorder:
        calls = [lambda: recorder.saved(1), lambda: recorder.kept(REFUSED)]
        for call in calls if late else reversed(calls):
            call()
        assert not recorder.save_advised
        if newer:
            run.step(2)
            recorder.record(2, "")
            recorder.saved(2)
            recorder.save_failed(1)
            assert not recorder.save_advised  # the newer one may become a version
        recorder.save_failed(2 if newer else 1)
        assert recorder.save_advised
        run.step(3)
        recorder.record(3, "")
    assert 3 not in box.steps()


def test_a_failed_save_is_withdrawn_after_its_notice() -> None:
    """Also if the node worker does not answer; entries are handed over afterwards."""

    class Told(BoxPort):
        def save_begun(self, step: int, generation: Generation) -> None:
            told.append(f"begun {step}")

        def save_failed(self, step: int) -> None:
            told.append(f"failed {step}")
            raise ClusterError("gone")

    box, run, told = EntryBox(), Run(), list[str]()
    with contextlib.closing(box.recorder(run.model, run.optimizer)) as recorder:
        recorder.port = Told(box)  # type: ignore[assignment]
        recorder.save_failed(0)  # nothing is recorded yet
        Journal(recorder).replay()
        recorder.saved(1)
        recorder.save_failed(1)
        run.step(2)
        recorder.record(2, "")
    assert told == ["begun 1", "failed 1"]
    assert box.steps() == [2]


def test_an_interrupted_record_loses_steps_until_a_save() -> None:
    """Entries after a gap would be useless."""

    class Interrupted(Digester):
        def take(self, *, whole: bool) -> Any:
            raise KeyboardInterrupt

    box, run = EntryBox(), Run()
    recorder = box.recorder(run.model, run.optimizer)
    with contextlib.closing(Journal(recorder)) as journal:
        journal.replay()
        for number in range(1, 4):
            run.step(number)
            digester = recorder.digester
            with pytest.raises(KeyboardInterrupt) if number == 2 else contextlib.nullcontext():
                if number == 2:
                    recorder.digester = Interrupted(recorder.state)
                journal.record(number)
            recorder.digester = digester
        assert journal.save_advised
    assert box.steps() == [1]


def test_an_interrupted_wait_for_copies_loses_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save of the step has begun before, and is what later entries follow."""
    box, run = EntryBox(), Run()
    recorder = box.recorder(run.model, run.optimizer)
    with contextlib.closing(Journal(recorder)) as journal:
        journal.replay()
        for number in range(1, 4):
            run.step(number)
            if number != 2:
                journal.record(number, number)
                continue
            recorder.saved(number)
            saved = copy.deepcopy(run)
            with monkeypatch.context() as patch:
                patch.setattr(recorder, "_await_copies", lambda step: fail(KeyboardInterrupt()))
                with pytest.raises(KeyboardInterrupt):
                    journal.record(number, number)
    with contextlib.closing(box.recorder(saved.model, saved.optimizer)) as recorder:
        recorder.restored(2, True)
        assert Journal(recorder).replay() == 3
    assert snapshot(saved.model, saved.optimizer) == snapshot(run.model, run.optimizer)


def test_values_too_long_for_an_entry_are_refused() -> None:
    """The entry could not be read."""
    run = Run()
    with contextlib.closing(EntryBox().journal(run.model, run.optimizer)) as journal:
        journal.replay()
        with pytest.raises(StateError, match="values of 101000002 bytes cannot be recorded"):
            journal.record(1, "x" * 101_000_000)


def test_steps_of_an_optimizer_of_accelerate_are_recorded() -> None:
    def trained(steps: range) -> bytes:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = Accelerator(cpu=True).prepare_optimizer(torch.optim.Adam(model.parameters()))
        journal = box.journal(model, optimizer)
        journal.replay()
        for number in steps:
            model(torch.ones(4)).square().sum().backward()
            optimizer.step()
            journal.record(number)
        journal.close()
        return snapshot(model, optimizer.optimizer)

    box = EntryBox()
    assert trained(range(1, 4)) == trained(range(0))


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    """A replay has the gradients of a step, and no closure that computes others."""
    model = nn.Linear(4, 4)
    with pytest.raises(StateError, match=r"LBFGS.*closure"):
        EntryBox().recorder(model, torch.optim.LBFGS(model.parameters()))


def test_a_closure_that_is_called_again_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    class Twice(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for _ in range(2):
                with torch.enable_grad():
                    closure()
                super().step()

    box, model = EntryBox(), nn.Linear(40, 3)
    optimizer = Twice(model.parameters(), lr=0.1)
    journal = box.journal(model, optimizer)
    journal.replay()
    optimizer.step(lambda: model(torch.ones(40)).square().sum().backward())
    journal.record(1)
    journal.close()
    text = caplog.text
    assert box.steps() == []
    assert "the first step is not recorded, nor are later ones" in text
    assert "an optimizer calls its closure several times" in text


@pytest.mark.parametrize("value", [np.longdouble(1), torch.eye(2).to_sparse(), torch.empty(2, device="meta"), object()])
def test_values_that_cannot_be_stored_are_named(value: object) -> None:
    """Those of a parameter group stay as they are."""
    run = Run()
    run.optimizer.param_groups[0]["mine"] = value
    box = EntryBox()
    with contextlib.closing(box.journal(run.model, run.optimizer)) as journal:
        journal.replay()
        with pytest.raises(StateError, match=r'values\["a"\]\[0\]: .* cannot be stored'):
            journal.record(1, {"a": [value]})
        run.step(1)
        journal.record(1)
    assert box.steps() == [1]


@pytest.mark.parametrize("error", [ClusterError("another rank has aborted"), KeyboardInterrupt()])
def test_a_replay_that_raises_can_be_repeated(error: BaseException) -> None:
    """It leaves the state of the version, on all ranks."""

    class Failing(BoxPort):
        def settle(self, vote: JournalVote) -> JournalChoice:
            if vote.reached is None:
                return super().settle(vote)
            raise error

    box, run, again = EntryBox(), Run(), Run()
    with contextlib.closing(box.journal(run.model, run.optimizer)) as journal:
        journal.replay()
        for number in range(1, 4):
            run.step(number)
            journal.record(number, number)
    before = snapshot(again.model, again.optimizer)
    recorder = box.recorder(again.model, again.optimizer)
    with contextlib.closing(Journal(recorder)) as journal:
        port, recorder.port = recorder.port, Failing(box)  # type: ignore[assignment]
        with pytest.raises(type(error)):
            journal.replay()
        recorder.port = port
        assert snapshot(again.model, again.optimizer) == before
        assert journal.replay() == 3
    assert snapshot(again.model, again.optimizer) == snapshot(run.model, run.optimizer)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")], ids=["interrupted", "no memory"])
def test_the_others_are_told_of_a_rank_that_cannot_replay(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not wait for it."""
    box, again = EntryBox(), [Run(), Run()]
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:

        def recorders(runs: list[Run]) -> list[StepRecorder]:
            made = [box.recorder(run.model, run.optimizer, rank=rank, world_size=2) for rank, run in enumerate(runs)]
            return [stack.enter_context(contextlib.closing(one)) for one in made]

        runs = [Run(), Run()]
        recording = [Journal(one) for one in recorders(runs)]
        list(pool.map(Journal.replay, recording))
        for run, journal in zip(runs, recording, strict=True):
            run.step(1)
            journal.record(1)
            assert journal.flush()
        replaying = recorders(again)
        monkeypatch.setattr(replaying[1].state, "copy", lambda: fail(error))
        waiting, failing = (pool.submit(Journal(one).replay) for one in replaying)
        assert type(failing.exception(60)) is type(error)
        with pytest.raises(ClusterError, match=f"rank 1 could not replay: {str(error) or 'KeyboardInterrupt'}"):
            waiting.result(60)
    assert snapshot(again[0].model, again[0].optimizer) == snapshot(again[1].model, again[1].optimizer)


def fail(error: BaseException) -> Any:
    raise error


def test_digests_hold_no_replaced_tensors() -> None:
    run = Run()
    run.step(1)
    digester = Digester(TrackedState(run.model, [run.optimizer]))
    for whole in (True, False):
        digester.take(whole=whole)
    replaced = weakref.ref(digester._plans[True].of[-1].tensor)
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    digester.take(whole=False)
    assert replaced() is None
