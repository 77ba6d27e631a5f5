"""A callback for Hugging Face's ``Trainer`` that saves a training and resumes it from a version."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_model
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ..orchestrator.client.checkpointer import Checkpointer
from ..orchestrator.journal.journal import Journal
from ..state.optimizers import unwrapped_optimizer
from ..state.per_rank import PerRank
from ..state.rng import Rng
from ..state.tree import State
from ..storage.addresses import local_path
from ..storage.arguments import integer
from ..storage.errors import StateError
from ..storage.format.values import is_plain
from ..storage.versions.version import Version
from ..storage.versions.version_selector import LATEST, VersionSelector
from .logged_values import log_of, metrics_of
from .save_requests import SaveRequests
from .training_progress import TrainingProgress, journal_options

if TYPE_CHECKING:
    from .deepspeed.trainer import TrainerEngine


class Checkpointing(TrainerCallback):
    """Save every so many optimizer steps and when a node will be removed, and resume from a version.

    Saved are weights, optimizer, learning rate scheduler, gradient scaler, the Trainer's state, and random generators. The
    numbers that the Trainer logged last become the version's metrics: a step is saved after its evaluation. Pass
    ``save_strategy="no"`` to the arguments, or the Trainer saves files as well. Works with plain tensors and DTensors: a single
    device, or DDP; and with DeepSpeed's ZeRO 1, 2 and 3, if ``resume`` is called before each training.

    Args:
        checkpointer: This rank's, from ``raystow.ray_train`` or ``raystow``. The caller closes it.
        every_n_steps: Save after every so many optimizer steps. None: the ``interval`` of the checkpointer counts.
        journal: Whether to record every step, so that a failure loses one at most. ``resume`` must be called then, also in a new
            run. See ``docs/journal.md``.
        durable_every: Steps of the journal after which they go to the store, as ``raystow.Checkpointer.journal`` takes it.

    Raises:
        StateError: An argument is invalid, or ``durable_every`` without ``journal``.

    Example:
        >>> trainer.train(resume_from_checkpoint=checkpointing.resume(trainer))
    """

    def __init__(
        self, checkpointer: Checkpointer, *, every_n_steps: int | None = None, journal: bool = False, durable_every: int = 0
    ) -> None:
        self._checkpointer = checkpointer
        self._steps = None if every_n_steps is None else integer("every_n_steps", every_n_steps, least=1, instead="None")
        self._journaled, self._durable_every = journal_options(journal, durable_every)
        self._journal: Journal | None = None
        self._optimizer: State | None = None
        self._restored: State | None = None
        self._folder: Path | None = None
        self._engine: TrainerEngine | None = None
        self._others: list[TrainerCallback] = []
        self._ended = self._due = self._asked = False
        self._requests = SaveRequests(checkpointer, counts=every_n_steps is not None)

    def save_now(self) -> None:
        """Ask for a save at one of the next optimizer steps, within about two seconds of them, or at the last one.

        One rank is enough. It may be called from a signal handler or another thread.
        """
        self._requests.ask()

    def resume(self, trainer: Trainer, version: VersionSelector = LATEST) -> str | None:
        """Restore a version into the trainer's model and optimizer.

        Args:
            trainer: The Trainer that this callback belongs to.
            version: See ``raystow.Checkpointer.restore``.

        Returns:
            The value for ``train(resume_from_checkpoint=...)``: None if there is no version yet, else a folder with weights and
            progress below the arguments' ``output_dir``, one for each machine. It is removed at the end of the training.

        Raises:
            StateError: The version does not match the trainer's model and optimizer, or ``journal=True`` with DeepSpeed.
            NotFound: There is no such version.
        """
        self._others = trainer.callback_handler.callbacks
        progress = TrainingProgress()
        parts = {"trainer": PerRank(progress), "rng": Rng()}
        if trainer.is_deepspeed_enabled:
            found = self._resume_engine(trainer, version, parts)
        else:
            optimizer = unwrapped_optimizer(trainer.create_optimizer())
            found = self._checkpointer.restore({"model": trainer.model, "optim": optimizer, **parts}, version)
        self._restored = None if found is None else {"trainer": progress.value, "rng": Rng().state_dict()}
        if self._journaled:
            self._journal = self._checkpointer.journal(trainer.model, optimizer, durable_every=self._durable_every)
            self._restored = self._journal.replay() or self._restored
        if self._restored is None:
            return None
        if self._engine is None:
            self._optimizer = optimizer.state_dict()
            self._optimizer["param_groups"] = copy.deepcopy(self._optimizer["param_groups"])
        return self._folder_of(trainer, "start" if found is None else found.attempt)

    def _resume_engine(self, trainer: Trainer, version: VersionSelector, parts: State) -> Version | None:
        """Restore the parts besides DeepSpeed's engine, which exists only later, and is restored then."""
        from .deepspeed.trainer import TrainerEngine

        if self._journaled:
            raise StateError("steps of DeepSpeed cannot be recorded", remedy="pass journal=False")
        self._engine = TrainerEngine(trainer, self._checkpointer, version)
        return self._engine.restore(parts)

    def _folder_of(self, trainer: Trainer, attempt: str) -> str:
        """The folder for the Trainer, which one process of a machine makes. Its name tells what was restored."""
        assert self._restored is not None
        state = self._restored["trainer"]["state"]
        name = f"raystow-{platform.node()}-{attempt}.{state['global_step']}"
        self._folder = local_path("output_dir", trainer.args.output_dir) / name
        with trainer.args.main_process_first(local=True):
            if not self._folder.exists():
                _write(self._folder, None if self._engine is not None else trainer.model, state)
        return os.fspath(self._folder)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: object) -> None:
        """Load the restored state: not earlier, since before this the Trainer makes and starts a new learning rate schedule, and
        with ``model_init`` a new optimizer."""
        self._ended = self._due = self._asked = False
        if self._engine is not None:
            self._engine.begun()
        if self._optimizer is not None:
            unwrapped_optimizer(parts["optimizer"]).load_state_dict(self._optimizer)
            self._optimizer = None
        if self._restored is not None:
            scheduler: torch.optim.lr_scheduler.LRScheduler = parts["lr_scheduler"]
            scheduler.load_state_dict(self._restored["trainer"]["scheduler"])
            scaler, scale = _scaler(parts), self._restored["trainer"].get("scaler")
            if scaler is not None and scale:
                scaler.load_state_dict(scale)
            self._load_trainer_state(args, state)
        TrainingProgress(self._progress(state, control, parts)).check()

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: object) -> None:
        """Record and save the last step of the epoch before. Set the random generators if the save was made between epochs."""
        self._end_step(args, state, control, parts)
        if self._restored is not None and self._restored["trainer"]["state"]["epoch"] % 1 == 0:
            self._load_generators()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: object) -> None:
        """Record and save the step before. Set the random generators, once and only now: skipping data uses them."""
        self._end_step(args, state, control, parts)
        if self._restored is not None:
            self._load_generators()

    def _load_trainer_state(self, args: TrainingArguments, state: TrainerState) -> None:
        """Load what the folder of ``resume`` does not have: what JSON would change, such as the states of callbacks."""
        assert self._restored is not None
        for name, value in self._restored["trainer"]["state"].items():
            if not is_plain(value):
                setattr(state, name, value)
        if not args.restore_callback_states_from_checkpoint:
            return
        for name, saved in state.stateful_callbacks.items():
            own = [one for one in self._others if isinstance(one, ExportableState) and type(one).__name__ == name]
            for callback, made_from in zip(own, saved if isinstance(saved, list) else [saved], strict=False):
                vars(callback).update(vars(callback.from_state(made_from)))

    def _load_generators(self) -> None:
        assert self._restored is not None
        Rng().load_state_dict(self._restored["rng"])
        self._restored = None

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Wait until the tensors of the saves in flight have been read."""
        self._checkpointer.fence()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: object) -> None:
        """Decide whether to save the step. It is recorded and saved as soon as the Trainer has logged and evaluated, and all
        callbacks have counted it."""
        self._asked = self._requests.due(state.global_step, args.device)
        self._ended, self._due = True, self._asked or (self._steps is not None and state.global_step % self._steps == 0)
        self._save_before_evaluation(args, state, control, parts)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: object) -> None:
        """Save the training's last step before the Trainer loads the best model."""
        if control.should_training_stop and self._requests.due(state.global_step, args.device, last=True):
            self._due = self._asked = True
        if control.should_training_stop and (args.load_best_model_at_end or not control.should_evaluate):
            self._end_step(args, state, control, parts)
        self._save_before_evaluation(args, state, control, parts)

    def _save_before_evaluation(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, parts: Mapping[str, object]
    ) -> None:
        """Save what was asked for if an evaluation follows, which may take longer than a node has left. The step stays due: what
        the evaluation changes, such as schedules and early stopping, is saved after it."""
        if self._due and self._asked and control.should_evaluate:
            self._save(args, state, control, parts)

    def _end_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, parts: Mapping[str, object]
    ) -> None:
        """Record the step before, and save it if it is due."""
        if self._ended and self._journal is not None:
            values = {"trainer": self._progress(state, control, parts), "rng": Rng().state_dict()}
            self._journal.record(state.global_step, values=values)
        due, self._due, self._ended = self._due, False, False
        if due:
            self._save(args, state, control, parts)

    def _save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, parts: Mapping[str, object]) -> None:
        metrics = metrics_of({name: value for logs in state.log_history for name, value in logs.items()})
        own = {"trainer": PerRank(TrainingProgress(self._progress(state, control, parts))), "rng": Rng()}
        if self._engine is not None and self._engine.attached is not None:
            self._engine.attached.save({}, metrics, own)
            return
        if getattr(args, "hf_deepspeed_config", None) is not None:
            raise StateError("the engine of DeepSpeed is not known", remedy="call resume(trainer) before trainer.train")
        training = {"model": parts["model"], "optim": unwrapped_optimizer(parts["optimizer"]), **own}
        self._checkpointer.save(training, step=state.global_step, metrics=metrics)

    def _progress(self, state: TrainerState, control: TrainerControl, parts: Mapping[str, object]) -> State:
        """The states of the Trainer, its callbacks, the learning rate schedule and the gradient scaler."""
        stateful = [part for part in (*self._others, control) if isinstance(part, ExportableState)]
        state.stateful_callbacks.update(TrainerState(stateful_callbacks=stateful).stateful_callbacks)
        scheduler: torch.optim.lr_scheduler.LRScheduler = parts["lr_scheduler"]
        fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        fields["log_history"] = log_of(state.log_history)
        scaler = _scaler(parts)
        return {
            "state": fields,
            "scheduler": scheduler.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
        }

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: object) -> None:
        """Record and save the last step, and wait for it as ``Checkpointer.wait``. Remove the folder of ``resume``."""
        try:
            self._end_step(args, state, control, parts)
            self._checkpointer.wait()
        finally:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)


def _scaler(parts: Mapping[str, object]) -> torch.amp.GradScaler | None:
    """The gradient scaler of fp16, which accelerate gives to the optimizer."""
    return getattr(parts["optimizer"], "scaler", None)


def _write(folder: Path, model: torch.nn.Module | None, state: Mapping[str, object]) -> None:
    """Make the folder atomically: on a shared ``output_dir`` another process may make it, too. Without a model, it is for
    DeepSpeed, of whose checkpoints the Trainer expects a folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.iterdir():
        if left.name.rpartition("-")[0] == folder.name.rpartition("-")[0]:
            shutil.rmtree(left, ignore_errors=True)  # left by a training that died on this machine
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        made = Path(unfinished) / "made"
        made.mkdir()
        if model is None:
            (made / "global_step0").mkdir()
        else:
            save_model(model, os.fspath(made / "model.safetensors"))  # save_pretrained would on rank 0 alone
        (made / "trainer_state.json").write_text(json.dumps({name: value for name, value in state.items() if is_plain(value)}))
        with contextlib.suppress(OSError):
            made.rename(folder)
