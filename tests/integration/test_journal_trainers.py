"""Trainer callbacks with ``journal=True``: an interrupted training continues at its last step without a version, or, after a
loss of all memory, at its last durable step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from helpers.journal_port import EntryBox
from helpers.segment_run import SegmentRun
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import raystow
from raystow.orchestrator.journal.journal import Journal
from raystow.storage.errors import StateError

STEPS = 6


class NoVersions:
    """A Checkpointer of a run without versions, which records steps in a box."""

    def __init__(self, box: EntryBox) -> None:
        self._box = box
        self.journals: list[Journal] = []

    def restore(self, into: dict[str, Any], version: Any = "latest") -> None:
        pass

    def fence(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def due(self, step: int, interval: raystow.Interval) -> bool:
        return False

    def journal(self, model: nn.Module, *optimizers: torch.optim.Optimizer, durable_every: int = 0) -> Journal:
        self.journals.append(self._box.journal(model, *optimizers, **({"every": durable_every} if durable_every else {})))
        return self.journals[-1]


class StoreBox:
    """Records steps in segments of a store; its memory is lost when a training ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.run: SegmentRun | None = None

    def journal(self, model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> Journal:
        if self.run is not None:
            self.run.write()
        self.run = SegmentRun(self._folder, every=every)
        return Journal(self.run.recorder(SimpleNamespace(model=model, optimizer=optimizer)))


def count_of(optimizer: torch.optim.Optimizer) -> int:
    """The steps that an optimizer has counted."""
    return int(next(iter(optimizer.state.values()))["step"])


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Measured(Module):
    """Each validation draws random numbers, and halves the learning rate."""

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.log("figure", float(self.current_epoch) + 0.1 * torch.rand(()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch", "monitor": "figure"}}


def fit(
    box: EntryBox | StoreBox, steps: int, folder: Path, durable_every: int = 0, kind: type[Module] = Module
) -> dict[str, torch.Tensor]:
    """Train epochs of one batch, so that the data loader needs no state; return the weights."""
    torch.manual_seed(0)
    module, run = kind(), NoVersions(box)
    callback = raystow.lightning.Checkpointing(run, every_n_steps=100, journal=True, durable_every=durable_every)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", callbacks=[callback], gradient_clip_val=0.1, default_root_dir=folder,
        num_sanity_val_steps=0, **quiet,
    )  # fmt: skip
    data = DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=16, shuffle=False)
    trainer.fit(module, data, data if kind is Measured else None)
    for journal in run.journals:
        journal.close()
    assert trainer.global_step == steps
    assert count_of(trainer.optimizers[0]) == steps
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [Module, Measured])
def test_lightning_continues_at_the_last_step(tmp_path: Path, kind: type[Module]) -> None:
    """Also if its validation changes the learning rate."""
    undisturbed = fit(EntryBox(), STEPS, tmp_path, kind=kind)
    box = EntryBox()
    fit(box, 4, tmp_path, kind=kind)
    assert box.steps() == [1, 2, 3, 4]
    resumed = fit(box, STEPS, tmp_path, kind=kind)
    assert box.steps() == [1, 2, 3, 4, 5, 6]
    assert all(torch.equal(resumed[name], value) for name, value in undisturbed.items())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trainer", ["lightning", "huggingface"])
def test_training_continues_at_a_durable_step_after_memory_loss(trainer: str, tmp_path: Path) -> None:
    """Steps 1 to 4 are durable, and step 5 is lost."""
    play = {"lightning": fit, "huggingface": train}[trainer]
    undisturbed = play(EntryBox(), STEPS, tmp_path)
    box = StoreBox(tmp_path / "store")
    play(box, 5, tmp_path, 2)
    resumed = play(box, STEPS, tmp_path, 2)
    assert box.run is not None
    infos = box.run.memories[0].own()
    assert [info.step for info in infos if info.generation == infos[-1].generation] == [5, 6]
    assert all(torch.equal(resumed[name], value) for name, value in undisturbed.items())


def test_durable_steps_need_a_journal() -> None:
    for callback in (raystow.lightning.Checkpointing, raystow.huggingface.Checkpointing):
        with pytest.raises(StateError, match="durable_every without a journal"):
            callback(NoVersions(EntryBox()), every_n_steps=1, durable_every=2)


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(8, generator=torch.Generator().manual_seed(at))}


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.net(x).square().mean()}


class RandomEvaluation(transformers.Trainer):
    """Each evaluation draws random numbers."""

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        torch.rand(1)
        return super().evaluate(*arguments, **options)


def train(
    box: EntryBox | StoreBox, steps: int, folder: Path, durable_every: int = 0, **evaluation: Any
) -> dict[str, torch.Tensor]:
    transformers.set_seed(0)
    run = NoVersions(box)
    callback = raystow.huggingface.Checkpointing(run, every_n_steps=100, journal=True, durable_every=durable_every)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=8, save_strategy="no", report_to=[], use_cpu=True,
        logging_strategy="no", disable_tqdm=True, **evaluation,
    )  # fmt: skip
    callbacks = [callback, End(steps)]
    trainer = RandomEvaluation(Loss(), arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=callback.resume(trainer))
    for journal in run.journals:
        journal.close()
    assert count_of(trainer.optimizer.optimizer) == steps
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


class End(transformers.TrainerCallback):
    """Ends a training early, to simulate a failure."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self._steps


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("evaluation", [{}, {"eval_strategy": "steps", "eval_steps": 2}])
def test_hugging_face_continues_at_the_last_step(tmp_path: Path, evaluation: dict[str, Any]) -> None:
    """Also after an evaluation."""
    undisturbed = train(EntryBox(), STEPS, tmp_path, **evaluation)
    box = EntryBox()
    train(box, 4, tmp_path, **evaluation)
    assert box.steps() == [1, 2, 3, 4]
    resumed = train(box, STEPS, tmp_path, **evaluation)
    assert box.steps() == [1, 2, 3, 4, 5, 6]
    assert all(torch.equal(resumed[name], value) for name, value in undisturbed.items())
