"""For Hugging Face's ``Trainer``: a callback that saves a training, and lets it go on from the newest version."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save_model
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..client import Checkpointer
from . import torch_training


class Checkpointing(TrainerCallback):
    """Saves every ``every_n_steps`` optimizer steps. To go on from the newest version, let ``resume`` say where to:

    ``trainer.train(resume_from_checkpoint=checkpointing.resume(trainer))``

    ``checkpointer``: this rank's, of ``raystow.ray_train`` or raystow's own; whoever made it closes it. What is saved: weights,
    optimizer, learning rate scheduler, Trainer's state, and torch's random generators. A version's metrics are the numbers that
    Trainer has logged last. Pass ``save_strategy="no"`` to the arguments, or Trainer saves files as well.

    For plain tensors and DTensors: a single device, or DDP. Not saved: the scaling of gradients in fp16.
    """

    def __init__(self, checkpointer: Checkpointer, *, every_n_steps: int) -> None:
        self._checkpointer, self._steps = checkpointer, every_n_steps
        self._restored: dict[str, Any] | None = None
        self._folder: Path | None = None

    def resume(self, trainer: Trainer) -> str | None:
        """Restore the newest version into the trainer's model and optimizer; what ``train`` takes as ``resume_from_checkpoint``:
        None if there is no version.

        Else a folder below the arguments' ``output_dir``, one for each machine, with the weights and the progress: Trainer
        reads there which of the data it has seen. It goes at the end of the training.
        """
        optimizer = trainer.create_optimizer()
        for group in optimizer.param_groups:  # as a schedule of learning rates does, which Trainer makes later
            group.setdefault("initial_lr", group["lr"])
        state = {**torch_training.state_of(trainer.model, [optimizer]), "trainer": ""}
        version = self._checkpointer.restore_latest(into=state)
        if version is None:
            return None
        self._restored = state
        self._folder = Path(trainer.args.output_dir) / f"raystow-{platform.node()}-{version.attempt}"
        with trainer.args.main_process_first(local=True):
            if not self._folder.exists():
                _write(self._folder, trainer.model, json.loads(state["trainer"])["state"])
        return os.fspath(self._folder)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        """Take what was restored: now, since Trainer has made a new schedule of learning rates, and begun it."""
        if self._restored is not None:
            torch_training.load(model, [_unwrapped(optimizer)], self._restored)
            lr_scheduler.load_state_dict(json.loads(self._restored["trainer"])["scheduler"])

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Set the random generators, once: to skip data takes numbers from them."""
        if self._restored is not None:
            torch_training.load_rng(self._restored)
            self._restored = None

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Wait until what is being saved has been read."""
        self._checkpointer.fence()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        """Save, if it is time."""
        if state.global_step % self._steps:
            return
        progress = {"state": dataclasses.asdict(state), "scheduler": lr_scheduler.state_dict()}
        logged = {name: value for logs in state.log_history for name, value in logs.items() if isinstance(value, int | float)}
        held = torch_training.state_of(model, [_unwrapped(optimizer)])
        self._checkpointer.save({**held, "trainer": json.dumps(progress)}, step=state.global_step, metrics=logged)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Remove the folder that ``resume`` made."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer in what accelerate makes of it."""
    return getattr(optimizer, "optimizer", optimizer)


def _write(folder: Path, model: Any, state: dict[str, Any]) -> None:
    """Make the folder, whole at once: on a shared ``output_dir`` somebody else may make it, too."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f"raystow-{platform.node()}-*"):
        shutil.rmtree(left, ignore_errors=True)  # of a training that died
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        made = Path(unfinished) / "made"
        made.mkdir()
        save_model(model, os.fspath(made / "model.safetensors"))  # save_pretrained would on rank 0 alone
        (made / "trainer_state.json").write_text(json.dumps(state))
        with contextlib.suppress(OSError):
            made.rename(folder)
