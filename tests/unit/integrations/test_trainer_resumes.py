"""Trainings by Lightning and Hugging Face, resumed: weights, moments and learning rates are those of an undisturbed training."""

from __future__ import annotations

import functools
import random  # noqa: TID251  modules draw from it
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import transformers
from helpers.memory_run import MemoryRun
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader, Dataset
from transformers.trainer_callback import ExportableState

import raystow

pytestmark = pytest.mark.filterwarnings("ignore")


class Warmup:
    """A schedule with a state of its own."""

    def __init__(self) -> None:
        self.calls = {0: 0}

    def __call__(self, epoch: int) -> float:
        self.calls[0] += 1
        return 1 / (1 + self.calls[0])


Scheduler = Callable[[optim.Optimizer], Any]
SCHEDULERS: dict[str, Scheduler] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, Warmup()),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: schedulers.LinearLR(o, total_iters=5),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 2, scale_fn=Warmup()),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, 12),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, threshold=0.9),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.MultiStepLR(o, [1]), schedulers.MultiStepLR(o, [1, 2])], [2]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler([schedulers.MultiStepLR(o, [2, 4]), schedulers.StepLR(o, 3)]),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=5),
}

Optimizer = Callable[[Any], optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": lambda p: optim.SGD(p, 0.1, momentum=0.9),
    "AdamW with a tensor": lambda p: optim.AdamW(p, torch.tensor(0.01), foreach=False, amsgrad=True),
    **{
        kind.__name__: functools.partial(kind, lr=0.01)
        for kind in (
            *(optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.ASGD),
            *(optim.RMSprop, optim.Rprop, optim.Adafactor),
        )
    },
}


def test_every_scheduler_of_torch_is_tried() -> None:
    public = {name for name in schedulers.__all__ if hasattr(getattr(schedulers, name), "load_state_dict")}
    assert SCHEDULERS.keys() == public - {"LRScheduler"} | {"SWALR"}


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Draws noise by all generators, as augmentations do."""

    def __init__(self, noise: bool = True) -> None:
        self._noise = noise

    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        noise = random.random() + np.random.random() + torch.rand(()).item() if self._noise else 0.0
        return {"x": torch.full((4,), at / 8 + noise)}


class Net(nn.Module):
    """Draws by all generators in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.tanh(self.net(x) + random.random() - np.random.random()).square().mean()}


class Module(pl.LightningModule):
    def __init__(self, optimizer: Optimizer, scheduler: Scheduler | None, interval: str = "epoch") -> None:
        super().__init__()
        self.net, self._make = Net(), (optimizer, scheduler, interval)
        self.rates: list[list[float]] = []

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        self.rates.append([float(group["lr"]) for group in self.trainer.optimizers[0].param_groups])
        loss = self.net(**batch)["loss"]
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer, scheduler, interval = self._make
        made = optimizer(self.parameters())
        if scheduler is None:
            return made
        return {"optimizer": made, "lr_scheduler": {"scheduler": scheduler(made), "interval": interval, "monitor": "loss"}}


def by_lightning(
    run: MemoryRun, folder: Path, new: Callable[[], Module], loader: Callable[[], Any], *others: pl.Callback, **until: int
) -> Module:
    """Train a new module until an epoch or step, as a new process would, and save after each."""
    pl.seed_everything(0, verbose=False)
    module, unit = new(), "steps" if "max_steps" in until else "epochs"
    callback = raystow.lightning.Checkpointing(run, **{f"every_n_{unit}": 1})
    trainer = pl.Trainer(
        **until, accelerator="cpu", devices=1, default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
        logger=False, enable_checkpointing=False, num_sanity_val_steps=0, callbacks=[callback, *others],
    )  # fmt: skip
    trainer.fit(module, loader())
    return module


def shuffled() -> Any:
    return DataLoader(Rows(), batch_size=4, shuffle=True)


def check_lightning(
    folder: Path, new: Callable[[], Module], loader: Callable[[], Any] = shuffled, unit: str = "epochs", ends: Any = (3, 6)
) -> None:
    """Compare a training that stops, and is extended, with an undisturbed one."""
    run, (stop, end) = MemoryRun(), ends
    whole = by_lightning(MemoryRun(), folder, new, loader, **{f"max_{unit}": end})
    first = by_lightning(run, folder, new, loader, **{f"max_{unit}": stop})
    second = by_lightning(run, folder, new, loader, **{f"max_{unit}": end})
    check(whole, first, second)


def check(whole: Any, first: Any, second: Any) -> None:
    assert first.rates + second.rates == whole.rates
    assert all(value.isfinite().all() for value in whole.parameters())
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_lightning_resumes_each_scheduler(tmp_path: Path, name: str, interval: str) -> None:
    check_lightning(tmp_path, lambda: Module(OPTIMIZERS["SGD"], SCHEDULERS[name], interval))


@pytest.mark.parametrize("name", [*OPTIMIZERS, "LBFGS"])
def test_lightning_resumes_each_optimizer(tmp_path: Path, name: str) -> None:
    optimizers = {**OPTIMIZERS, "LBFGS": lambda p: optim.LBFGS(p, lr=0.01, max_iter=2)}
    check_lightning(tmp_path, lambda: Module(optimizers[name], SCHEDULERS["StepLR"]))


def test_lightning_steps_through_milestones_after_a_restart(tmp_path: Path) -> None:
    run = MemoryRun()
    for end in (3, 6):
        resumed = by_lightning(
            run, tmp_path, lambda: Module(lambda p: optim.SGD(p, 0.1), SCHEDULERS["MultiStepLR"]), shuffled, max_epochs=end
        )
    assert [rates[0] for rates in resumed.rates[::2]] == pytest.approx([0.01, 0.001, 0.001])


class StatefulLoader:
    """Shuffles by a generator of its own, whose state is a tensor."""

    def __init__(self) -> None:
        self._generator, self._given = torch.Generator().manual_seed(3), 0
        self._begun = self._generator.get_state()

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        if self._given in (0, 4):
            self._begun, self._given = self._generator.get_state(), 0
        self._generator.set_state(self._begun)
        for batch in torch.randperm(8, generator=self._generator).reshape(4, 2).tolist()[self._given :]:
            self._given += 1
            rows = [Rows()[at]["x"] for at in batch]
            yield {"x": torch.stack(rows)}

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state(), "begun": self._begun, "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        self._begun, self._given = state["begun"], state["given"]


def of_torchdata(noise: bool = True, **options: Any) -> Any:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    return loaders.StatefulDataLoader(Rows(noise), batch_size=2, **options)


LOADERS: dict[str, Callable[[], Any]] = {
    "own": StatefulLoader,
    "torchdata": lambda: of_torchdata(),
    "torchdata, shuffled": lambda: of_torchdata(shuffle=True),
    "torchdata, workers": lambda: of_torchdata(noise=False, shuffle=True, num_workers=1),
}


def scheduled() -> Module:
    return Module(OPTIMIZERS["SGD"], SCHEDULERS["MultiStepLR"])


@pytest.mark.parametrize("stop", [3, 4, 5])
@pytest.mark.parametrize("loader", LOADERS)
def test_lightning_resumes_within_an_epoch(tmp_path: Path, loader: str, stop: int) -> None:
    """Also at its end, which is step 4."""
    check_lightning(tmp_path, scheduled, LOADERS[loader], "steps", (stop, 14))


@pytest.mark.parametrize("loader", LOADERS)
def test_lightning_resumes_loaders_after_an_epoch(tmp_path: Path, loader: str) -> None:
    check_lightning(tmp_path, scheduled, LOADERS[loader], "epochs", (1, 4))


class CountedBatches(pl.Callback):
    """Counts the batches of each epoch, after the callback that saves."""

    def __init__(self) -> None:
        self.batches = Counter[int]()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.batches[trainer.current_epoch] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


@pytest.mark.parametrize("stop", [3, 4, 6, 8])
def test_lightning_resumes_callbacks_that_count_batches(tmp_path: Path, stop: int) -> None:
    run = MemoryRun()
    for end in (stop, 11):
        by_lightning(run, tmp_path, scheduled, StatefulLoader, counted := CountedBatches(), max_steps=end)
    assert counted.batches == Counter({0: 4, 1: 4, 2: 3})


def test_lightning_resumes_early_stopping(tmp_path: Path) -> None:
    """It stops after as many epochs as in an undisturbed training."""

    class Worse(Module):
        def on_train_epoch_end(self) -> None:
            self.log("worse", float(self.current_epoch))

    def train(run: MemoryRun, *ends: int) -> list[Module]:
        new = lambda: Worse(OPTIMIZERS["SGD"], None)  # noqa: E731
        return [
            by_lightning(run, tmp_path, new, shuffled, pl.callbacks.EarlyStopping("worse", patience=4), max_epochs=end)
            for end in ends
        ]

    (whole,) = train(MemoryRun(), 9)
    assert len(whole.rates) == 2 * 5
    check(whole, *train(MemoryRun(), 3, 9))


class Recording(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step_begin(self, *_: Any, optimizer: optim.Optimizer, **__: Any) -> None:
        self.rates.append(float(optimizer.param_groups[0]["lr"]))


class Counting(transformers.TrainerCallback, ExportableState):
    """Counts the steps of each epoch."""

    def __init__(self, first: Any = None) -> None:
        self.first, self.epochs = first or {1: "one"}, Counter[int]()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.epochs[int(state.epoch)] += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"first": self.first}, "attributes": {"epochs": self.epochs}}


def by_hugging_face(
    run: MemoryRun,
    folder: Path,
    steps: int,
    optimizer: Optimizer = OPTIMIZERS["SGD"],
    scheduler: Scheduler = SCHEDULERS["ConstantLR"],
    *others: transformers.TrainerCallback,
    trainer: type[transformers.Trainer] = transformers.Trainer,
    **options: Any,
) -> Any:
    """Train a new model to a step, as a new process would, and save every second step; an epoch has four."""
    transformers.set_seed(0)
    model, callback, recording = Net(), raystow.huggingface.Checkpointing(run, every_n_steps=2), Recording()
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        per_device_train_batch_size=2, logging_steps=1, label_names=["x"], **options,
    )  # fmt: skip
    made = optimizer(model.parameters())
    own = trainer(
        model, arguments, train_dataset=Rows(noise=False), eval_dataset=Rows(noise=False), optimizers=(made, scheduler(made)),
        callbacks=[callback, recording, *others],
    )  # fmt: skip
    own.train(resume_from_checkpoint=callback.resume(own))
    model.rates = recording.rates
    return model


def check_hugging_face(folder: Path, *how: Any, stop: int = 6, end: int = 12, **options: Any) -> None:
    run = MemoryRun()
    whole = by_hugging_face(MemoryRun(), folder, end, *how, **options)
    check(whole, *(by_hugging_face(run, folder, steps, *how, **options) for steps in (stop, end)))


_QUICK = ("MultiStepLR", "ReduceLROnPlateau", "SequentialLR")


@pytest.mark.parametrize("name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SCHEDULERS])
def test_hugging_face_resumes_each_scheduler(tmp_path: Path, name: str) -> None:
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss"}
    options = evaluated if name == "ReduceLROnPlateau" else {}
    check_hugging_face(tmp_path, OPTIMIZERS["SGD"], SCHEDULERS[name], **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hugging_face_resumes_each_optimizer(tmp_path: Path, name: str) -> None:
    check_hugging_face(tmp_path, OPTIMIZERS[name])


@pytest.mark.parametrize(("stop", "evaluated"), [(2, "no"), (4, "no"), (8, "epoch"), (6, "steps")])
def test_hugging_face_draws_as_before_after_an_epoch(tmp_path: Path, stop: int, evaluated: str) -> None:
    """Steps 4 and 8 end an epoch: the next one begins to draw before its first step."""
    check_hugging_face(tmp_path, stop=stop, eval_strategy=evaluated, eval_steps=3)


def test_hugging_face_resumes_from_a_save_between_epochs(tmp_path: Path) -> None:
    """The save was made in the middle of a training, not at its end."""
    run = MemoryRun()
    whole = by_hugging_face(run, tmp_path, 12, eval_strategy="epoch")
    for step in (4, 6):
        kept = MemoryRun()
        kept.saved = {step: run.saved[step]}
        resumed = by_hugging_face(kept, tmp_path, 12, eval_strategy="epoch")
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True)), step


def test_hugging_face_restores_the_states_of_callbacks(tmp_path: Path) -> None:
    run = MemoryRun()
    for steps in (8, 12):
        counting = Counting()
        how = {"restore_callback_states_from_checkpoint": True}
        by_hugging_face(run, tmp_path, steps, OPTIMIZERS["SGD"], SCHEDULERS["ConstantLR"], counting, **how)
    assert counting.epochs == Counter({0: 3, 1: 4, 2: 4, 3: 1})
    assert counting.first == {1: "one"}


class Scaled(transformers.Trainer):
    """Scales the loss, as with fp16 on a GPU: one step is skipped, and the scale grows after three others."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**125, growth_interval=3)


def test_hugging_face_resumes_the_gradient_scaler(tmp_path: Path) -> None:
    scales = list[float]()

    class Scales(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            scales.append(parts["optimizer"].scaler.get_scale())

    how = OPTIMIZERS["SGD"], SCHEDULERS["StepLR"], Scales()
    check_hugging_face(tmp_path, *how, trainer=Scaled, max_grad_norm=0.0)
    whole, resumed = scales[:12], scales[12:]
    assert resumed == whole
    assert len(set(whole)) > 2


def test_hugging_face_resumes_what_model_init_makes_anew(tmp_path: Path) -> None:
    """The Trainer makes model, optimizer and schedule once more when the training begins."""

    def trained(run: MemoryRun, steps: int) -> Any:
        transformers.set_seed(0)
        callback = raystow.huggingface.Checkpointing(run, every_n_steps=2)
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=steps, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
            per_device_train_batch_size=2, label_names=["x"], lr_scheduler_type="constant_with_warmup", warmup_steps=6,
        )  # fmt: skip
        own = transformers.Trainer(
            model_init=Net, args=arguments, train_dataset=Rows(noise=False), callbacks=[callback, recording := Recording()]
        )
        own.train(resume_from_checkpoint=callback.resume(own))
        own.model.rates = recording.rates
        return own.model

    run = MemoryRun()
    check(trained(MemoryRun(), 8), trained(run, 4), trained(run, 8))


class Logging(transformers.Trainer):
    """Logs what is not plain."""

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        loss = super().compute_loss(*arguments, **options)
        self.log({"mean": np.mean([1.0, 2.0]), "half": np.float32(0.5), "loss_now": loss.detach(), "count": np.int64(3)})
        self.log({"text": "no number", "figure": object(), "many": [1, 2], "pair": torch.zeros(2)})
        return loss


def test_hugging_face_logs_of_any_type_do_not_end_a_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = MemoryRun()
    for steps in (2, 4):
        by_hugging_face(run, tmp_path, steps, trainer=Logging)
    metrics = run.saved[4][1]
    assert {name: metrics[name] for name in ("mean", "half", "count")} == {"mean": 1.5, "half": 0.5, "count": 3}
    assert isinstance(metrics["loss_now"], float)
    assert not metrics.keys() & {"text", "figure", "many", "pair"}
    said = [record.getMessage() for record in caplog.records if "the logged value" in record.getMessage()]
    assert len(said) == len(set(said)), "each is said once"
    assert any("'figure' of type object cannot be saved" in text for text in said)


def test_lightning_metrics_of_any_type_do_not_end_a_training(tmp_path: Path) -> None:
    class Measured(Module):
        def on_train_epoch_end(self) -> None:
            self.log("mean", np.mean([1.0, 2.0]))
            self.trainer.callback_metrics["pair"] = torch.zeros(2)
            self.trainer.callback_metrics["figure"] = object()

    run = MemoryRun()
    by_lightning(run, tmp_path, lambda: Measured(OPTIMIZERS["SGD"], None), shuffled, max_epochs=1)
    assert run.saved[2][1].keys() == {"loss", "mean"}
    assert run.saved[2][1]["mean"] == 1.5
