"""Gradients that are accumulated over several steps of a run are in no version, and a warning says so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch

from raystow.integrations.run.pending_gradients import PendingGradients


class Training:
    """A model, its optimizer and a gradient scaler. ``scale``: of the loss."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        self.scale = 1.0

    def backward(self) -> None:
        self.scaler.scale(self.scale * self.model(torch.ones(2)).sum()).backward()

    def accumulate(self, step: int) -> None:
        self.backward()
        if step % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def accumulate_into_kept_gradients(self, step: int) -> None:
        self.backward()
        if step % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def step_at_some(self, step: int) -> None:
        if step % 2 == 0:
            self.step(step)

    def scaled(self, step: int) -> None:
        self.scale = float("inf") if step % 2 else 1.0
        self.optimizer.zero_grad()
        self.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def noticed(step_of: Callable[[Training, int], None], caplog: pytest.LogCaptureFixture) -> list[str]:
    training = Training()
    with contextlib.closing(PendingGradients([training.optimizer])) as pending:
        for step in range(1, 7):
            pending.begin()
            step_of(training, step)
            pending.end(step)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("step_of", [Training.accumulate, Training.accumulate_into_kept_gradients])
def test_gradients_of_several_steps_are_noticed_once(
    step_of: Callable[[Training, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    [notice] = noticed(step_of, caplog)
    assert notice.startswith("step 1 has ended with gradients that no optimizer step has used: they are not saved")


@pytest.mark.parametrize("step_of", [Training.step, Training.step_at_some, Training.scaled])
def test_used_and_skipped_gradients_are_right(step_of: Callable[[Training, int], None], caplog: pytest.LogCaptureFixture) -> None:
    assert noticed(step_of, caplog) == []
