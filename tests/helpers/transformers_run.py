"""A training by Hugging Face's ``Trainer`` with dropout, evaluations, early stopping and a callback that asks for a save."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers.trainer_callback import ExportableState

import raystow
from helpers.memory_run import MemoryRun


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.net(x).square().mean()}


class AsksAt(transformers.TrainerCallback):
    """Asks for a save at a step, and may end the training with it."""

    def __init__(self, callback: raystow.huggingface.Checkpointing, step: int, *, stops: bool = False) -> None:
        self._callback, self._step, self._stops = callback, step, stops

    def on_step_begin(self, args: Any, state: transformers.TrainerState, control: Any, **_: Any) -> None:
        if state.global_step + 1 == self._step:
            self._callback.save_now()

    def on_step_end(self, args: Any, state: transformers.TrainerState, control: Any, **_: Any) -> None:
        control.should_training_stop |= self._stops and state.global_step == self._step


class CountsSteps(transformers.TrainerCallback, ExportableState):
    """Counts steps, after the callback that saves."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"steps": self.steps}, "attributes": {}}


class RandomEvaluation(transformers.Trainer):
    """Its evaluations use random numbers, and each is worse than the one before. ``seen``: the versions at each of them."""

    def __init__(self, *arguments: Any, run: MemoryRun, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._run, self.seen = run, dict[int, list[int]]()

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        metrics = {"eval_loss": float(self.state.global_step)}
        self.seen[self.state.global_step] = [*self._run.saved]
        torch.rand(1)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class Trained(NamedTuple):
    """``worse``: how often early stopping has seen no progress. ``seen``: see ``RandomEvaluation``."""

    weights: dict[str, torch.Tensor]
    steps: int
    worse: int
    seen: dict[int, list[int]]


def train(
    run: MemoryRun, steps: int, folder: Path, strategy: str, *, every: int | None = 2, asks_at: int = 0, stops: bool = False
) -> Trained:
    transformers.set_seed(0)
    callback = raystow.huggingface.Checkpointing(run, every_n_steps=every)
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, eval_strategy=strategy, eval_steps=2, logging_steps=2, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, per_device_train_batch_size=2, metric_for_best_model="eval_loss",
        greater_is_better=False, lr_scheduler_type="constant", restore_callback_states_from_checkpoint=True,
    )  # fmt: skip
    data = [{"x": torch.full((4,), number / 8)} for number in range(8)]
    patience, counts = transformers.EarlyStoppingCallback(early_stopping_patience=100), CountsSteps()
    callbacks = [AsksAt(callback, asks_at, stops=stops), callback, patience, counts]
    trainer = RandomEvaluation(Net(), arguments, run=run, train_dataset=data, eval_dataset=data, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=callback.resume(trainer))
    return Trained(dict(trainer.model.state_dict()), counts.steps, patience.early_stopping_patience_counter, trainer.seen)


def same(one: Trained, other: Trained) -> bool:
    weights = all(torch.equal(other.weights[name], value) for name, value in one.weights.items())
    return weights and (one.steps, one.worse) == (other.steps, other.worse)
