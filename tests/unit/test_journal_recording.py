"""Recording never fails the training, and keeps no memory that the training has replaced."""

from __future__ import annotations

import copy
import weakref
from types import SimpleNamespace

import pytest
import torch
from journal_port import EntryBox, snapshot
from torch import nn

from raystow.orchestrator.journal.state_digests import Digester
from raystow.orchestrator.journal.tracked_state import TrackedState


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


@pytest.mark.parametrize("part", ["_buffers", "_digester"])
def test_an_unexpected_error_loses_steps_until_the_next_save(
    part: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, run = EntryBox(), Run()
    journal = box.journal(run.model, run.optimizer)
    journal.replay()
    for number in range(1, 5):
        with monkeypatch.context() as patch:
            if number == 2:
                patch.setattr(journal, part, SimpleNamespace(begin=lambda: None))
            run.step(number)
            journal.record(number)
        if number == 3:
            assert journal.save_advised
            journal.saved(3)
            saved = copy.deepcopy(run)
    journal.close()
    assert box.steps() == [1, 4]
    assert "2 is not recorded" in caplog.text or "step after 1 is not recorded" in caplog.text
    assert "AttributeError" in caplog.text, "the traceback is logged"
    again = box.journal(saved.model, saved.optimizer)
    again.restored(3, True)
    again.replay()
    again.close()
    assert snapshot(saved.model, saved.optimizer) == snapshot(run.model, run.optimizer)


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
