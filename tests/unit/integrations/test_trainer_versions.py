"""The callbacks of trainers: which version they restore, what a version contains, and how trainings go on."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from helpers.memory_run import MemoryRun
from helpers.transformers_run import Net, same, train
from torch import nn

import raystow
from raystow.state import value_text
from raystow.storage.errors import SaveFailed, StateError


class EmptyRun:
    """A Checkpointer of a run without versions. ``asked``: the versions that a callback has requested."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def restore(self, into: dict[str, Any], version: Any = "latest") -> None:
        assert {"model", "optim", "trainer"} <= into.keys()
        self.asked.append(version)


@pytest.mark.parametrize(("option", "asked"), [({}, "latest"), ({"version": "step:60"}, "step:60")])
def test_a_callback_restores_the_requested_version(option: dict[str, str], asked: str) -> None:
    model, run = nn.Linear(2, 2), EmptyRun()
    optimizer = torch.optim.AdamW(model.parameters())

    plugin = SimpleNamespace(state_dict=dict)
    parts = {"datamodule": None, "precision_plugin": plugin, "callbacks": []}
    trainer = SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[], global_step=0, **parts)
    raystow.lightning.Checkpointing(run, every_n_steps=1, **option).on_fit_start(trainer, model)
    assert not optimizer.state, "Adam would begin to count at 1"

    trainer = SimpleNamespace(
        model=model,
        create_optimizer=lambda: optimizer,
        is_deepspeed_enabled=False,
        callback_handler=SimpleNamespace(callbacks=[]),
    )
    assert raystow.huggingface.Checkpointing(run, every_n_steps=1).resume(trainer, **option) is None
    assert not optimizer.state
    assert run.asked == [asked, asked]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("strategy", "evaluated"), [("steps", {2: 2, 4: 4, 6: 6, 8: 8}), ("epoch", {4: 4, 6: 4, 8: 8})])
def test_a_step_is_saved_after_its_evaluation(tmp_path: Path, strategy: str, evaluated: dict[int, int]) -> None:
    whole, halved = MemoryRun(), MemoryRun()
    expected = train(whole, 8, tmp_path, strategy)
    metrics = {step: metrics for step, (_, metrics) in whole.saved.items()}
    assert metrics.keys() == {2, 4, 6, 8}
    assert {step: of["eval_loss"] for step, of in metrics.items() if "eval_loss" in of} == evaluated
    state = value_text.loads(whole.saved[8][0]["trainer"]["text"])["state"]
    assert state["best_metric"] == min(evaluated.values())
    counter = state["stateful_callbacks"]["EarlyStoppingCallback"]["attributes"]["early_stopping_patience_counter"]
    assert counter == len(set(evaluated.values())) - 1
    halved.saved = {step: whole.saved[step] for step in (2, 4)}
    assert same(expected, train(halved, 8, tmp_path, strategy))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("preempted", [False, True])
@pytest.mark.parametrize(("strategy", "step"), [("steps", 3), ("steps", 6), ("steps", 4), ("epoch", 4)])
def test_transformers_saves_at_once_when_asked(tmp_path: Path, preempted: bool, strategy: str, step: int) -> None:
    """Before an evaluation, and again after it; a resumed training ends as this one. Step 4 ends an epoch."""
    run = MemoryRun(notice=step if preempted else 0)
    expected = train(run, 8, tmp_path, strategy, every=1000, asks_at=0 if preempted else step)
    assert run.saved.keys() == {step}
    if step in expected.seen:
        assert expected.seen[step] == [step]
    assert same(expected, train(run, 8, tmp_path, strategy, every=1000))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("strategy", "step"), [("steps", 3), ("steps", 4), ("epoch", 4)])
def test_transformers_saves_the_last_step_if_asked(tmp_path: Path, strategy: str, step: int) -> None:
    """Although it is not yet time to look for requests again."""
    run = MemoryRun(looks=False)
    train(run, 8, tmp_path, strategy, every=1000, asks_at=step, stops=True)
    assert run.saved.keys() == {step}
    assert same(train(MemoryRun(), 8, tmp_path, strategy), train(run, 8, tmp_path, strategy, every=1000))


@pytest.mark.filterwarnings("ignore")
def test_a_training_of_transformers_fails_if_its_last_save_does(tmp_path: Path) -> None:
    run = MemoryRun()
    train(run, 4, tmp_path, "steps")
    assert run.waited == [4], "the end of the training waits for the last save"
    run.error = SaveFailed("no space")
    with pytest.raises(SaveFailed, match="no space"):
        train(run, 8, tmp_path, "steps")
    assert not list(tmp_path.glob("raystow-*")), "the folder of resume is removed"


class CountedData(pl.LightningDataModule):
    """Counts the batches in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def on_after_batch_transfer(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        self.batches += 1
        return batch

    def train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
        return torch.utils.data.DataLoader(torch.ones(2, 4))

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "of": torch.tensor([3])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["of"].tolist() == [3]
        self.batches = state["batches"]


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Scale(pl.plugins.Precision):
    """Has a state as the precision plugin for fp16."""

    scale = 4.0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


def quiet_trainer(folder: Path, epochs: int, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    own = {"accelerator": "cpu", "devices": 1, "default_root_dir": folder, **quiet, **options}
    return pl.Trainer(max_epochs=epochs, callbacks=list(callbacks), **own)


@pytest.mark.filterwarnings("ignore")
def test_lightning_restores_data_module_and_loss_scale(tmp_path: Path) -> None:
    run = MemoryRun()

    def fit(epochs: int, scale: float) -> tuple[int, float]:
        data, plugin = CountedData(), Scale()
        callback = raystow.lightning.Checkpointing(run, every_n_epochs=1)
        trainer = quiet_trainer(tmp_path, epochs, callback, plugins=[plugin])
        plugin.scale = scale
        trainer.fit(Module(), datamodule=data)
        return data.batches, plugin.scale

    assert fit(2, 8.0) == (4, 8.0)
    assert fit(3, 4.0) == (6, 8.0)


class Remembering(Module):
    """Counts epochs in a buffer, which changes at the end of each, and in what it adds to a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []
        self.register_buffer("ended", torch.zeros(()))

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("loss", float(self.current_epoch))

    def on_train_epoch_end(self) -> None:
        self.epochs.append(self.current_epoch)
        self.ended += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["epochs"] = self.epochs

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["state_dict"]["ended"] == len(checkpoint["epochs"]) == checkpoint["epoch"] + 1
        self.epochs = checkpoint["epochs"]


class Adding(pl.Callback):
    """Adds the step to a checkpoint."""

    loaded = 0

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["added"] = trainer.global_step

    def on_load_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["added"]


def fit(run: MemoryRun, epochs: int, folder: Path, *others: pl.Callback, **every: int) -> tuple[pl.Trainer, Remembering]:
    """Train epochs of two batches, each with a validation at its end."""
    module, data = Remembering(), torch.utils.data.DataLoader(torch.ones(2, 4))
    trainer = quiet_trainer(folder, epochs, raystow.lightning.Checkpointing(run, **every), *others)
    trainer.fit(module, data, data)
    return trainer, module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [{"every_n_epochs": 1}, {"every_n_steps": 2}])
@pytest.mark.parametrize("at_epoch_end", [True, False])
def test_lightning_restores_callbacks_and_hooks(tmp_path: Path, every: dict[str, int], at_epoch_end: bool) -> None:
    """As they are after the validation and all hooks of an epoch."""
    run = MemoryRun()
    for epochs in (2, 5):
        stopping = pl.callbacks.EarlyStopping("loss", patience=9, check_on_train_epoch_end=at_epoch_end)
        trainer, module = fit(run, epochs, tmp_path, adding := Adding(), stopping, **every)
        assert (stopping.wait_count, float(stopping.best_score)) == (epochs - 1, 0.0)
        assert module.epochs == list(range(epochs))
        assert module.ended == epochs
        assert trainer.checkpoint_callback is None, "it would be asked for its best version"
    assert adding.loaded == 4
    assert [metrics["loss"] for _, metrics in run.saved.values()] == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.filterwarnings("ignore")
def test_callbacks_save_at_the_interval_of_the_checkpointer(tmp_path: Path) -> None:
    runs = lightning, hugging_face = MemoryRun(), MemoryRun()
    for run in runs:
        run.every = 3
    fit(lightning, 4, tmp_path)
    train(hugging_face, 8, tmp_path, "steps", every=None)
    assert [*lightning.saved] == [*hugging_face.saved] == [3, 6]


class Asking(pl.Callback):
    """Asks for a save before a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step + 1 == self._step:
            trainer.callbacks[0].save_now()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("step", [3, 4], ids=["within an epoch", "at its end"])
@pytest.mark.parametrize("preempted", [False, True])
def test_lightning_saves_at_once_when_asked(tmp_path: Path, step: int, preempted: bool) -> None:
    run = MemoryRun(notice=step if preempted else 0)
    fit(run, 4, tmp_path, Asking(-1 if preempted else step), every_n_epochs=1000)
    assert run.saved.keys() == {step}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("batches", [3, 5])
def test_lightning_saves_when_asked_before_the_first_step(tmp_path: Path, batches: int) -> None:
    """Also if gradients are accumulated then; and at the end, although it is not yet time to look for requests again."""
    run = MemoryRun(looks=batches > 3)
    callback = raystow.lightning.Checkpointing(run, every_n_epochs=1000)
    callback.save_now()
    data = torch.utils.data.DataLoader(torch.ones(batches, 4))
    quiet_trainer(tmp_path, 1, callback, accumulate_grad_batches=3).fit(Module(), data)
    assert run.saved.keys() == {1}


class Stopping(pl.Callback):
    """Asks for a save and ends the training in a step, as a handler of a signal does."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.callbacks[0].save_now()
            trainer.should_stop = True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("batches", [3, 9])
def test_lightning_saves_the_last_step_if_asked(tmp_path: Path, batches: int) -> None:
    """Although it is not yet time to look for requests again."""
    run = MemoryRun(looks=False)
    callback = raystow.lightning.Checkpointing(run, every_n_epochs=1000)
    data = torch.utils.data.DataLoader(torch.ones(batches, 4))
    quiet_trainer(tmp_path, 4, callback, Stopping()).fit(Module(), data)
    assert run.saved.keys() == {3}


@pytest.mark.filterwarnings("ignore")
def test_lightning_refuses_other_weights_in_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="replaces the weights"):
        fit(MemoryRun(), 1, tmp_path, pl.callbacks.WeightAveraging(), every_n_epochs=1)


class Stop(pl.Callback):
    """Ends a training early, to simulate a failure."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.should_stop = trainer.current_epoch + 1 >= self._epochs


@pytest.mark.filterwarnings("ignore")
def test_lightning_averages_weights_after_a_restart(tmp_path: Path) -> None:
    """The averages are in the state of the callback, which adds a scheduler during the training."""

    def average(run: MemoryRun, *ends: int) -> torch.Tensor:
        for end in ends:
            torch.manual_seed(0)
            averaging = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
            _, module = fit(run, 4, tmp_path, averaging, Stop(end), every_n_epochs=1)
        assert averaging.n_averaged == 4
        return module.net.weight.detach().clone()

    assert torch.equal(average(MemoryRun(), 3, 4), average(MemoryRun(), 4))


@pytest.mark.filterwarnings("ignore")
def test_lightning_refuses_a_version_with_fewer_schedulers(tmp_path: Path) -> None:
    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]

    run, data = MemoryRun(), torch.utils.data.DataLoader(torch.ones(2, 4))

    def train(module: pl.LightningModule) -> None:
        quiet_trainer(tmp_path, 1, raystow.lightning.Checkpointing(run, every_n_epochs=1)).fit(module, data)

    train(Module())
    with pytest.raises(StateError, match="has 1 learning rate schedulers, the version the states of 0"):
        train(Scheduled())


@pytest.mark.parametrize("interval", [0, -1, 2.5, True, "3"])
def test_callbacks_refuse_invalid_intervals(interval: Any) -> None:
    for make in (raystow.lightning.Checkpointing, raystow.huggingface.Checkpointing):
        with pytest.raises(StateError, match=r"every_n_steps is .*give an integer of at least 1"):
            make(EmptyRun(), every_n_steps=interval)
    with pytest.raises(StateError, match=r"every_n_epochs is .*give an integer of at least 1"):
        raystow.lightning.Checkpointing(EmptyRun(), every_n_epochs=interval)


@pytest.mark.filterwarnings("ignore")
def test_folders_of_other_machines_remain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one whose name begins with the name of this one."""
    run = MemoryRun()
    train(run, 2, tmp_path, "steps")
    for folder in ("raystow-gpu-1-old", "raystow-gpu-1-2-first"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr("platform.node", lambda: "gpu-1")
    callback = raystow.huggingface.Checkpointing(run, every_n_steps=2)
    arguments = transformers.TrainingArguments(str(tmp_path), max_steps=4, report_to=[], use_cpu=True)
    made = callback.resume(transformers.Trainer(Net(), arguments, callbacks=[callback]))
    assert made == str(tmp_path / "raystow-gpu-1-first.2")
    assert {path.name for path in tmp_path.glob("raystow-*")} == {"raystow-gpu-1-first.2", "raystow-gpu-1-2-first"}


class UnstorableSchedule(torch.optim.lr_scheduler.ConstantLR):
    """Its state has an object."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": [object()]}


class Unreached(Net):
    """Must not be trained."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        raise AssertionError("the training has begun")


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_names_an_unstorable_scheduler_early(tmp_path: Path) -> None:
    callback, model = raystow.huggingface.Checkpointing(MemoryRun(), every_n_steps=100), Unreached()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
    )  # fmt: skip
    parts = {"train_dataset": [{"x": torch.ones(4)}], "optimizers": (optimizer, UnstorableSchedule(optimizer))}
    with pytest.raises(StateError, match=r'trainer\["scheduler"\]\["seen"\]\[0\]: an object of class object cannot be stored'):
        transformers.Trainer(model, arguments, callbacks=[callback], **parts).train()


class Unready(pl.Callback):
    """Has a state only in the training."""

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.batches = 0


class Unstorable(pl.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": object()}


@pytest.mark.filterwarnings("ignore")
def test_lightning_names_an_unstorable_callback_early(tmp_path: Path) -> None:
    fit(MemoryRun(), 1, tmp_path, Unready(), every_n_epochs=1)
    with pytest.raises(StateError, match=r'trainer\["callbacks"\]\["Unstorable"\]\["seen"\]: an object of class object'):
        fit(MemoryRun(), 0, tmp_path, Unstorable(), every_n_epochs=1)


@pytest.mark.parametrize("error", [None, SaveFailed("no space")])
def test_a_fit_of_lightning_fails_if_its_last_save_does(tmp_path: Path, error: SaveFailed | None) -> None:
    run = MemoryRun()
    run.error = error
    with pytest.raises(SaveFailed, match="no space") if error else contextlib.nullcontext():
        fit(run, 1, tmp_path, every_n_epochs=1)
    assert run.waited == [max(run.saved)], "fit waits for the last save"


class Failing(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        raise ArithmeticError("the loss is not finite")


def test_a_failed_save_does_not_mask_the_error_of_a_training(tmp_path: Path) -> None:
    run = MemoryRun()
    run.error = SaveFailed("no space")
    with pytest.raises(ArithmeticError):
        fit(run, 1, tmp_path, Failing(), every_n_epochs=1)
    assert run.waited == []
