"""For PyTorch Lightning: a callback that saves a training, and goes on from the newest version."""

from __future__ import annotations

import json
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ...storage.errors import StateError
from ..client import Checkpointer
from . import torch_training


class Checkpointing(Callback):
    """Restores when ``fit`` begins, and saves every ``every_n_steps`` optimizer steps, every ``every_n_epochs`` epochs, or both.

    ``checkpointer``: this rank's, of ``raystow.ray_train`` or raystow's own; whoever made it closes it. What is saved: weights,
    optimizers, learning rate schedulers, the progress of Trainer's loops, and torch's random generators. A version's metrics are
    ``trainer.callback_metrics``. Pass ``enable_checkpointing=False`` to the Trainer, or Lightning saves files as well.

    Lightning finds its place in the middle of an epoch only if the data loader is stateful; else save at the ends of epochs. Not
    saved: what other callbacks keep, such as the patience of ``EarlyStopping``.

    For strategies whose tensors are plain or DTensors: a single device, DDP, and FSDP2 (``ModelParallelStrategy``).
    """

    def __init__(
        self, checkpointer: Checkpointer, *, every_n_steps: int | None = None, every_n_epochs: int | None = None
    ) -> None:
        if every_n_steps is None and every_n_epochs is None:
            raise StateError("it would never save", remedy="pass every_n_steps= or every_n_epochs=")
        self._checkpointer, self._steps, self._epochs = checkpointer, every_n_steps, every_n_epochs
        self._saved = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the newest version, if there is one."""
        state = self._state(trainer, pl_module)
        if self._checkpointer.restore_latest(into=state) is not None:
            torch_training.load(pl_module, trainer.optimizers, state)
            progress = json.loads(state["trainer"])
            for config, saved in zip(trainer.lr_scheduler_configs, progress["schedulers"], strict=True):
                config.scheduler.load_state_dict(saved)
            trainer.fit_loop.load_state_dict(progress["loops"])
            torch_training.load_rng(state)
        self._saved = trainer.global_step

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Wait until what is being saved has been read."""
        self._checkpointer.fence()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save, if it is time."""
        if self._steps is not None and trainer.global_step % self._steps == 0:
            self._save(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, if it is time."""
        if self._epochs is not None and (trainer.current_epoch + 1) % self._epochs == 0:
            self._save(trainer, pl_module)

    def _save(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == self._saved:  # gradients are accumulated, or the batch was the epoch's last
            return
        self._saved = trainer.global_step
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._checkpointer.save(self._state(trainer, pl_module), step=trainer.global_step, metrics=metrics)

    def _state(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        schedulers = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
        try:  # one text, since its names are not the same at all times
            progress = json.dumps({"loops": trainer.fit_loop.state_dict(), "schedulers": schedulers})
        except (TypeError, ValueError) as error:
            what = f"loops or learning rate schedulers have a state that JSON has not: {error}"
            raise StateError(what, remedy="give the data loader or scheduler a state of plain values") from error
        return {**torch_training.state_of(pl_module, trainer.optimizers), "trainer": progress}
