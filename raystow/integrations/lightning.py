"""A callback for PyTorch Lightning that saves a training and resumes it from a version."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import lightning.pytorch
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.call import (
    _call_callbacks_load_state_dict,
    _call_callbacks_on_load_checkpoint,
    _call_callbacks_on_save_checkpoint,
    _call_callbacks_state_dict,
    _call_lightning_module_hook,
)

from ..orchestrator.client.checkpointer import Checkpointer
from ..orchestrator.journal.journal import Journal
from ..state.per_rank import PerRank
from ..state.rng import Rng
from ..state.tree import State
from ..storage.arguments import integer
from ..storage.errors import StateError
from ..storage.versions.version_selector import LATEST, VersionSelector
from .logged_values import metrics_of
from .save_requests import SaveRequests
from .training_progress import TrainingProgress, journal_options

_Hook = Callable[[Trainer, LightningModule], None]


class Checkpointing(Callback):
    """Restore a version when ``fit`` starts, and save regularly and when a node will be removed.

    Saved are weights, optimizers, learning rate schedulers, the progress of the Trainer's loops, random generators, and the
    states of the datamodule, of the precision plugin (the loss scale) and of the other callbacks, with what they and the
    module add in ``on_save_checkpoint``: plain values, small tensors, and dicts, lists and tuples of these. Their
    ``on_load_checkpoint`` is called when the weights are loaded. Callbacks that replace the weights of a checkpoint, such as
    ``WeightAveraging``, are not supported.
    ``trainer.callback_metrics`` become the version's metrics. Pass ``enable_checkpointing=False`` to the Trainer, or Lightning
    saves files as well. Works with a single device, DDP and FSDP2 (``ModelParallelStrategy``).

    Put this callback before the others. Lightning resumes in the middle of an epoch only with a stateful data loader; without
    one, save at the ends of epochs. With ``every_n_steps``, the results of a validation in the middle of an epoch are in the
    next version.

    Args:
        checkpointer: This rank's, from ``raystow.ray_train`` or ``raystow``. The caller closes it.
        every_n_steps: Save after every so many optimizer steps.
        every_n_epochs: Save after every so many epochs. Without this and ``every_n_steps``, the ``interval`` of the checkpointer
            counts.
        version: The version to restore, as ``raystow.Checkpointer.restore`` takes it. A training that restarts by itself needs
            the latest one, or it starts again from here.
        journal: Whether to record every step, so that a failure loses one at most; needs a stateful data loader, or epochs of
            one batch. ``on_save_checkpoint`` is called at each step then. See ``docs/journal.md``.
        durable_every: Steps of the journal after which they go to the store, as ``raystow.Checkpointer.journal`` takes it.

    Raises:
        StateError: An argument is invalid, or ``durable_every`` without ``journal``.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        version: VersionSelector = LATEST,
        journal: bool = False,
        durable_every: int = 0,
    ) -> None:
        self._checkpointer, self._version, self._saved, self._recorded = checkpointer, version, 0, 0
        self._steps = None if every_n_steps is None else integer("every_n_steps", every_n_steps, least=1, instead="None")
        self._epochs = None if every_n_epochs is None else integer("every_n_epochs", every_n_epochs, least=1, instead="None")
        self._journaled, self._durable_every = journal_options(journal, durable_every)
        self._journal: Journal | None = None
        counts = every_n_steps is not None or every_n_epochs is not None
        self._due, self._requests = False, SaveRequests(checkpointer, counts=counts)
        self._generators: State | None = None
        self._last = _LastCallback(self._after_step, self._after_epoch)

    def save_now(self) -> None:
        """Ask for a save at one of the next optimizer steps, within about two seconds of them, or at the last one.

        One rank is enough. It may be called from a signal handler or another thread.
        """
        self._requests.ask()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the version, if there is one. Add a callback that saves."""
        progress, rng = TrainingProgress(), Rng()
        restored = self._checkpointer.restore(_state(trainer, pl_module, progress), self._version)
        self._generators = None
        if restored is not None:
            self._generators = rng.state_dict()
            _load_progress(trainer, progress.value)
        if self._journaled:
            self._journal = self._checkpointer.journal(pl_module, *trainer.optimizers, durable_every=self._durable_every)
            if (values := self._journal.replay()) is not None:
                self._generators = values["rng"]
                _load_progress(trainer, values["trainer"])
        if self._generators is not None:
            rng.load_state_dict(self._generators)
        _check(trainer)
        self._saved = self._recorded = trainer.global_step
        if self._last not in trainer.callbacks:
            trainer.callbacks.append(self._last)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore what Lightning's preparation of the data has used or left out: within an epoch it has drawn random numbers; at
        the end of one it does not load the states of data loaders."""
        loop, generators = trainer.fit_loop, self._generators
        self._generators = None
        if generators is None:
            return
        if states := loop._combined_loader_states_to_load:
            loop._combined_loader._load_state_dicts(states)
            loop._combined_loader_states_to_load = []
            iter(loop._data_fetcher)  # at the end of the epoch that has ended, as where it was saved
            Rng().load_state_dict(generators)
            iter(loop._data_fetcher)  # begins the next one
        elif not trainer.is_last_batch:
            Rng().load_state_dict(generators)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the saves in flight as ``Checkpointer.wait``, which tells if the last one failed."""
        self._checkpointer.wait()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the callback that ``on_fit_start`` has added."""
        if self._last in trainer.callbacks:
            trainer.callbacks.remove(self._last)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
        """Wait until the tensors of the saves in flight have been read."""
        self._checkpointer.fence()

    def _after_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the step, and save at the interval of steps and what was asked for; the last step of an epoch at its end."""
        self._due = self._asked(trainer) or (self._steps is not None and trainer.global_step % self._steps == 0)
        if trainer.is_last_batch:
            return
        self._record(trainer, "step")
        if self._due:
            self._save(trainer, pl_module, "step")

    def _after_epoch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._record(trainer, "epoch")
        ended = trainer.current_epoch + 1
        last = trainer.should_stop or trainer.global_step == trainer.max_steps or ended == trainer.max_epochs
        regular = self._epochs is not None and ended % self._epochs == 0
        if self._due or regular or (last and self._asked(trainer, last=True)):
            self._save(trainer, pl_module, "epoch")

    def _record(self, trainer: Trainer, ended: str) -> None:
        if self._journal is not None and trainer.global_step > self._recorded:
            self._recorded = trainer.global_step
            values = {"trainer": _progress(trainer, ended), "rng": Rng().state_dict()}
            self._journal.record(trainer.global_step, values=values)

    def _asked(self, trainer: Trainer, *, last: bool = False) -> bool:
        """Whether to save at once. Without a step to save, as while the first gradients are accumulated, a request remains."""
        step = trainer.global_step
        return step > self._saved and self._requests.due(step, trainer.strategy.root_device, last=last)

    def _save(self, trainer: Trainer, pl_module: LightningModule, ended: str) -> None:
        if trainer.global_step == self._saved:  # gradients are accumulated, or the batch was the epoch's last
            return
        self._saved = trainer.global_step
        state = _state(trainer, pl_module, TrainingProgress(_progress(trainer, ended)))
        self._checkpointer.save(state, step=trainer.global_step, metrics=metrics_of(trainer.callback_metrics))


class _LastCallback(Checkpoint):
    """Saves when the states of the other callbacks are those after a step or an epoch. Lightning calls a ``Checkpoint`` after
    them, at the end of an epoch also after the module and callbacks such as ``EarlyStopping``."""

    def __init__(self, after_step: _Hook, after_epoch: _Hook) -> None:
        self._after_step, self._after_epoch = after_step, after_epoch

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        self._after_step(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._after_epoch(trainer, pl_module)


def _state(trainer: Trainer, pl_module: LightningModule, progress: TrainingProgress) -> State:
    """A training, to save or to restore into."""
    optimizers = trainer.optimizers
    optim = optimizers[0] if len(optimizers) == 1 else list(optimizers)
    return {"model": pl_module, "optim": optim, "trainer": PerRank(progress), "rng": Rng()}


def _progress(trainer: Trainer, ended: str) -> State:
    """The states of loops, schedulers and other parts after a ``step`` or an ``epoch``."""
    return {
        "loops": trainer.fit_loop.state_dict(),
        **_own_states(trainer),
        "plateaus": _plateaus(trainer, ended),
        "checkpoint": _added(trainer),
    }


def _own_states(trainer: Trainer) -> State:
    """The states that Lightning's parts have at any time."""
    return {
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "parts": {name: part.state_dict() for name, part in _parts(trainer).items()},
    }


def _plateaus(trainer: Trainer, ended: str) -> list[tuple[int, object]]:
    """The schedulers that Lightning steps after the hook of this save, as ``ReduceLROnPlateau``, and what they will be given."""
    at = trainer.current_epoch if ended == "epoch" else trainer.fit_loop.epoch_loop.batch_idx
    found = []
    for number, config in enumerate(trainer.lr_scheduler_configs):
        metric = trainer.callback_metrics.get(config.monitor)
        if config.reduce_on_plateau and config.interval == ended and (at + 1) % config.frequency == 0 and metric is not None:
            found.append((number, metric))
    return found


def _check(trainer: Trainer) -> None:
    """Raise ``StateError`` before the training for what its first save would refuse."""
    states = _own_states(trainer)
    with contextlib.suppress(Exception):  # of a callback that is not ready; a save asks it again
        states["callbacks"] = _call_callbacks_state_dict(trainer)
    TrainingProgress(states).check()


def _load_progress(trainer: Trainer, progress: State) -> None:
    """Load loops, schedulers and other parts. The hooks that are called may draw random numbers."""
    schedulers, saved = trainer.lr_scheduler_configs, progress["schedulers"]
    if len(schedulers) > len(saved):  # fewer are right: StochasticWeightAveraging adds one to them later
        what = f"the training has {len(schedulers)} learning rate schedulers, the version the states of {len(saved)}"
        raise StateError(what, remedy="use the schedulers of the save")
    for config, state_of_scheduler in zip(schedulers, saved, strict=False):
        config.scheduler.load_state_dict(state_of_scheduler)
    for number, metric in progress["plateaus"]:
        _call_lightning_module_hook(trainer, "lr_scheduler_step", schedulers[number].scheduler, metric)
    trainer.fit_loop.load_state_dict(progress["loops"])
    for name, part in _parts(trainer).items():
        if state_of_part := progress["parts"].get(name):
            part.load_state_dict(state_of_part)
    checkpoint = {**_checkpoint(trainer), **progress["checkpoint"]}
    _call_lightning_module_hook(trainer, "on_load_checkpoint", checkpoint)
    _call_callbacks_on_load_checkpoint(trainer, checkpoint)
    _call_callbacks_load_state_dict(trainer, checkpoint)
    _begin_next_epoch(trainer.fit_loop)


def _begin_next_epoch(loop: _FitLoop) -> None:
    """Let the training begin an epoch if the save was made at the end of one. With ``max_steps``, Lightning would go on with that
    one for a batch, and step schedulers too early."""
    epochs = loop.epoch_progress
    if epochs.current.ready == epochs.current.processed and loop.epoch_loop.batch_progress.is_last_batch:
        for counted in epochs.current, epochs.total:  # else Lightning completes the epoch once more
            counted.completed = counted.processed
        _Loop.restarting.fset(loop, False)  # the setter of the subclass does not let it be so


def _parts(trainer: Trainer) -> State:
    parts = {"datamodule": trainer.datamodule, "precision": trainer.precision_plugin}
    return {name: part for name, part in parts.items() if part is not None}


def _checkpoint(trainer: Trainer) -> State:
    """What hooks find in a checkpoint of Lightning, besides what ``_added`` returns."""
    return {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": lightning.pytorch.__version__,
        "state_dict": trainer.lightning_module.state_dict(),
    }


def _added(trainer: Trainer) -> State:
    """The states of callbacks, and what the hooks of callbacks and the module add to a checkpoint of Lightning."""
    given = _checkpoint(trainer)
    checkpoint = {**given, "callbacks": _call_callbacks_state_dict(trainer)}
    _call_callbacks_on_save_checkpoint(trainer, checkpoint)
    _call_lightning_module_hook(trainer, "on_save_checkpoint", checkpoint)
    if checkpoint.get("state_dict") is not given["state_dict"]:
        what = "on_save_checkpoint of a callback or of the module replaces the weights, which is not supported"
        raise StateError(what, remedy="remove the callback; an average that is a submodule is saved with the weights")
    return {key: value for key, value in checkpoint.items() if key not in given}
