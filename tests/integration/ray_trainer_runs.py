"""Trainings by Lightning and Hugging Face in Ray Train, which save only on a notice and at their last step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import ray
import torch
import transformers
from torch import nn

import raystow
from integration.ray_train_runs import Run
from raystow.storage.runtime.clock import SYSTEM


class _Notes:
    """Notes of the last rank: see ``Run``. Each step takes ``pace`` seconds, as a real one. On the last rank a bit of the first
    weight flips before the step ``flip``."""

    def __init__(self, config: dict[str, Any], checkpointer: raystow.Checkpointer) -> None:
        self._run, self._pace, self._flip = Run(Path(config["folder"])), config["pace"], config.get("flip", 0)
        self._world = checkpointer.world_size
        self._last = checkpointer.rank == self._world - 1

    def start(self, step: int) -> None:
        if self._last:
            node = ray.get_runtime_context().get_node_id()
            self._run.note(f"start-{step}-{self._world}-{node}-{SYSTEM.token()}")

    def begin(self, step: int, model: nn.Module) -> None:
        if self._last and step == self._flip:
            next(model.parameters()).data.view(torch.int32)[0, 2] ^= 1 << 20

    def step(self, step: int) -> None:
        SYSTEM.sleep(self._pace)
        if self._last:
            self._run.note(f"step-{step}")


class _LightningNotes(pl.Callback):
    def __init__(self, notes: _Notes) -> None:
        self._notes = notes

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._notes.start(trainer.global_step)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self._notes.begin(trainer.global_step + 1, module)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._notes.step(trainer.global_step)


class _TransformersNotes(transformers.TrainerCallback):
    def __init__(self, notes: _Notes) -> None:
        self._notes = notes

    def on_train_begin(self, args: Any, state: transformers.TrainerState, control: Any, **_: Any) -> None:
        self._notes.start(state.global_step)

    def on_step_begin(self, args: Any, state: transformers.TrainerState, control: Any, model: nn.Module, **_: Any) -> None:
        self._notes.begin(state.global_step + 1, model)

    def on_step_end(self, args: Any, state: transformers.TrainerState, control: Any, **_: Any) -> None:
        self._notes.step(state.global_step)


class _Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.net(x).square().mean()}


def by_lightning(config: dict[str, Any]) -> None:
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer

    steps = config["steps"]
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4 * steps, 4)))
    with raystow.ray_train.Checkpointer() as checkpointer:
        trainer = pl.Trainer(
            max_steps=steps, accelerator="cpu", devices="auto", strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()],
            callbacks=[
                raystow.lightning.Checkpointing(checkpointer, every_n_steps=steps),
                _LightningNotes(_Notes(config, checkpointer)),
            ],
            enable_checkpointing=False, enable_progress_bar=False, logger=False,
        )  # fmt: skip
        prepare_trainer(trainer).fit(_Module(), data)


def by_transformers(config: dict[str, Any]) -> None:
    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(), max_steps=config["steps"], per_device_train_batch_size=1, save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=True, ddp_backend="gloo",
    )  # fmt: skip
    data = [{"x": torch.ones(4)} for _ in range(4 * config["steps"])]
    with raystow.ray_train.Checkpointer() as checkpointer:
        callback = raystow.huggingface.Checkpointing(checkpointer, every_n_steps=config["steps"])
        notes = _TransformersNotes(_Notes(config, checkpointer))
        trainer = transformers.Trainer(_Net(), arguments, train_dataset=data, callbacks=[callback, notes])
        trainer.train(resume_from_checkpoint=callback.resume(trainer))


TRAINERS: dict[str, Callable[[dict[str, Any]], None]] = {"lightning": by_lightning, "transformers": by_transformers}
