"""``attach``: replaces how one engine saves and loads checkpoints."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import distributed

from ...orchestrator.client.checkpointer import Checkpointer
from ...state.per_rank import PerRank
from ...state.tree import State
from ...storage.errors import NotARepository, NotFound, StateError
from ...storage.extras import check_methods, tried
from ...storage.repository import open_repository
from ...storage.versions.version import Version
from ...storage.versions.version_selector import VersionSelector
from ..training_progress import TrainingProgress
from .engine_state import (
    apply_moments,
    apply_progress,
    apply_weights,
    engine_progress,
    engine_state,
    gather_persistent,
    groups_as_saved,
)
from .partitions import Engine

logger = logging.getLogger(__name__)

METRIC = "deepspeed_checkpoint"
"""The metric of a version with the last part of ``save_dir`` and the tag."""
NOT_LATEST = "deepspeed_not_latest"
"""The metric of a version that was saved with ``save_latest=False``: only its tag loads it."""

check_methods(DeepSpeedEngine, ("save_checkpoint", "load_checkpoint", "zero_optimization_stage", "curriculum_learning_enabled"))


def attach(engine: Engine, uri: str | os.PathLike[str] | Checkpointer, **options: Any) -> Checkpointer:
    """Make an engine save to a repository and load from it.

    Afterwards ``engine.save_checkpoint`` starts an asynchronous save of the version, and ``engine.load_checkpoint`` restores one,
    from any number of ranks and any of the ZeRO stages 1 to 3. Each step of the optimizer waits until the tensors of a save have
    been read. Nothing is written to ``save_dir``, which only names the checkpoint. Call this on every rank.

    Args:
        engine: What ``deepspeed.initialize`` or Accelerate returned, with ZeRO 1, 2 or 3.
        uri: The repository, or a ``Checkpointer`` that is used instead of a new one.
        options: Arguments of ``raystow.Checkpointer``, such as ``retention``; not with a ``Checkpointer``.

    Returns:
        The ``Checkpointer``. Close it, or use it in a ``with`` block, so that the process waits for its last saves.

    Raises:
        StateError: ``options`` are given with a ``Checkpointer``, the engine is attached already, or it uses something that is
            not supported: pipeline, tensor or expert parallelism, MiCS, NVMe, ZenFlow, SuperOffload, Muon without ZeRO 3, or no
            ZeRO.
        Unsupported: DeepSpeed has changed; the error names the version that was tried.
    """
    _check(engine)
    if isinstance(uri, Checkpointer) and options:
        raise StateError(f"{', '.join(options)} cannot be given with a Checkpointer", remedy="pass them to the Checkpointer")
    checkpointer = uri if isinstance(uri, Checkpointer) else Checkpointer(uri, **options)
    AttachedEngine(engine, checkpointer)
    return checkpointer


class AttachedEngine:
    """Saves and restores an engine by a ``Checkpointer``, and takes the place of two methods of the engine."""

    def __init__(self, engine: Engine, checkpointer: Checkpointer) -> None:
        _check(engine)
        self._engine, self._checkpointer = engine, checkpointer
        step: Callable[..., object] = engine.optimizer.step

        @functools.wraps(step)
        def fenced_step(*args: object, **kwargs: object) -> object:
            checkpointer.fence()
            return step(*args, **kwargs)

        engine.optimizer.step = fenced_step
        engine.save_checkpoint, engine.load_checkpoint = self.save_checkpoint, self.load_checkpoint

    def save(self, client_state: Mapping[str, object], metrics: Mapping[str, object], parts: State | None = None) -> None:
        """Start to save a version at the step ``engine.global_steps``. ``parts``: what is no part of the engine."""
        with tried("deepspeed", "0.19"):
            tree = engine_state(self._engine).tree
            progress = TrainingProgress(engine_progress(self._engine, dict(client_state)), what="engine")
        state = {**tree, "progress": PerRank(progress), **(parts or {})}
        self._checkpointer.save(state, step=self._engine.global_steps, metrics=metrics)

    def restore(
        self, version: VersionSelector, *, strict: bool = True, moments: bool = True, schedule: bool = True, progress: bool = True
    ) -> tuple[Version, State] | None:
        """Restore a version, and return it with its ``client_state``; None if there is none. ``strict``: see
        ``Checkpointer.restore``. The other options say whether to restore the optimizer's state, the learning rate schedule, and
        anything but tensors."""
        engine = self._engine
        with tried("deepspeed", "0.19"):
            if engine.zero_optimization_stage() == 3:
                engine.optimizer.checkpoint_event_prologue()  # partitions all parameters
            found = engine_state(engine)
        marker, saved = groups_as_saved(found), TrainingProgress(what="engine")
        into = {**found.tree, "progress": PerRank(saved), "optim": {**found.tree["optim"], "param_groups": marker}}
        unused = ["trainer", "rng"]  # of a Trainer around the engine
        if not moments:
            del into["optim"]
            unused.append("optim")
        try:
            restored = self._checkpointer.restore(into, version, strict=strict, allow_unused=unused)
        except StateError as error:
            if moments and "optim." in error.what:
                kind = type(engine.optimizer.optimizer).__name__
                remedy = f"{kind} loads only what {kind} has saved: use the optimizer of the save, or load_optimizer_states=False"
                raise StateError(error.what, subject=error.subject, remedy=remedy) from error
            if "not saved: master." in error.what:
                remedy = "use the model of the save; if raystow.deepspeed did not save it, restore before deepspeed.initialize"
                raise StateError(error.what, subject=error.subject, remedy=remedy) from error
            raise
        if restored is None:
            gather_persistent(engine)
            self._checkpointer.prepare(found.tree)
            return None
        if "client_state" not in saved.value:  # possible without ``strict``
            what = f"version {restored.id} was not saved by raystow.deepspeed; the model is in an undefined state now"
            raise StateError(what, remedy="restore its weights before deepspeed.initialize")
        with tried("deepspeed", "0.19"):
            apply_weights(engine, found)
            if moments:
                options = into["optim"]["param_groups"]
                apply_moments(engine, found, found.tree["optim"]["param_groups"] if options is marker else options)
            if progress:
                apply_progress(engine, saved.value, schedule=schedule)
        return restored, saved.value["client_state"]

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, object] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Start to save a version under the name of ``save_dir`` and ``tag``."""
        if exclude_frozen_parameters:
            raise StateError("frozen parameters cannot be left out", remedy="unchanged tensors are stored once anyway")
        name = f"{PurePath(save_dir).name}/{tag or f'global_step{self._engine.global_steps}'}"
        self.save(client_state or {}, {METRIC: name} if save_latest else {METRIC: name, NOT_LATEST: True})
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: object = None,
    ) -> tuple[str | None, State | None]:
        """Restore the newest version, or that which was saved under the name of ``load_dir`` and ``tag``; raise ``NotFound`` if
        there is none with this tag."""
        if custom_load_fn is not None:
            raise StateError("custom_load_fn is not called", remedy="restore a state of your own with Checkpointer.restore")
        chosen = self._choose(PurePath(load_dir).name, tag)
        restored = chosen and self.restore(
            "latest" if chosen < 0 else chosen,
            strict=load_module_strict,
            moments=load_optimizer_states and not load_module_only,
            schedule=load_lr_scheduler_states,
            progress=not load_module_only,
        )
        if not restored:
            if tag is not None:
                raise NotFound(f"there is no checkpoint {PurePath(load_dir).name}/{tag}", subject=self._checkpointer.uri)
            logger.warning("%s has no checkpoint %s: nothing is loaded", self._checkpointer.uri, load_dir)
            return None, None
        version, client_state = restored
        return f"{self._checkpointer.uri}#{version.id}", client_state

    def _choose(self, folder: str, tag: str | None) -> int:
        """The id of the version that all ranks restore; -1 for the latest, 0 for none. Rank 0 decides, since a version may be
        committed meanwhile."""
        chosen = torch.tensor([_choose(self._checkpointer.uri, folder, tag) if distributed.get_rank() == 0 else 0])
        on_device = chosen.to(self._engine.device)
        distributed.broadcast(on_device, 0)
        return int(on_device.item())


def _choose(uri: str, folder: str, tag: str | None) -> int:
    try:
        versions = open_repository(uri).versions()
    except NotARepository:
        return 0
    pattern = re.compile(f"{re.escape(folder)}/{'.*' if tag is None else re.escape(tag)}")
    loadable = [version for version in versions if tag is not None or NOT_LATEST not in version.metrics]
    named = [version for version in loadable if pattern.fullmatch(str(version.metrics.get(METRIC, "")))]
    found = named or (loadable if tag is None else [])
    if not found:
        return 0 if tag is not None or versions else -1
    return -1 if tag is None and found[-1].id == versions[-1].id else found[-1].id


def _check(engine: Engine) -> None:
    zero = engine.optimizer
    problem = ""
    if "save_checkpoint" in vars(engine):
        problem = "is attached already"
    elif engine.zero_optimization_stage() not in (1, 2, 3) or not hasattr(zero, "optimizer"):
        problem = "does not use ZeRO 1, 2 or 3"
    elif isinstance(engine.module, PipelineModule) or engine.mp_world_size > 1 or engine.has_moe_layers:
        problem = "uses pipeline, tensor or expert parallelism"
    elif engine.zero_nvme_offload_optimizer() or getattr(zero, "params_in_nvme_and_cpu", False) or engine.zenflow:
        problem = "uses NVMe offload or ZenFlow"
    elif engine.super_offload():
        problem = "uses SuperOffload"
    elif engine.zero_optimization_stage() < 3 and "Muon" in type(zero.optimizer).__name__:
        problem = "uses Muon without ZeRO 3"
    elif distributed.get_world_size(zero.dp_process_group) != distributed.get_world_size():
        problem = "partitions parameters among some of the ranks only"
    if problem:
        raise StateError(f"the engine {problem}", remedy="see docs/deepspeed.md for what is supported")
