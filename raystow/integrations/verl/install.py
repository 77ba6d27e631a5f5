"""Puts raystow's saving and loading in the place of verl's, in this process."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from verl.single_controller.base.worker import Worker
from verl.utils.checkpoint import checkpoint_handler, checkpoint_manager
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from ...state.tree import State
from ...storage.extras import check_methods, tried
from . import manager, trainers
from .settings import configure

_PPO = {"verl.trainer.ppo.ray_trainer": "RayPPOTrainer", "verl.trainer.ppo.v1.trainer_base": "PPOTrainer"}
_MEGATRON = "verl.utils.checkpoint.megatron_checkpoint_manager"


@functools.cache
def install() -> None:
    """Replace methods of verl's classes, so that objects that exist already change, too: verl makes the critic's manager before
    it imports ``model.external_lib``.

    Raises:
        AttributeError: verl has changed.
    """
    check_methods(Worker, ("execute_with_func_generator",))
    for ours in (manager.save_checkpoint, manager.load_checkpoint):
        theirs = getattr(FSDPCheckpointManager, ours.__name__)
        if list(inspect.signature(theirs).parameters) != list(inspect.signature(ours).parameters):
            raise AttributeError(f"{theirs.__qualname__} has other parameters")
        setattr(FSDPCheckpointManager, ours.__name__, ours)
    handler = checkpoint_handler.CheckpointHandler
    handler.save_checkpoint = trainers.saving_one_version_of_sft(handler.save_checkpoint)
    handler.load_checkpoint = trainers.loading_sft(handler.load_checkpoint, configure_worker)
    handler._load_dataloader_state = trainers.loading_data(handler._load_dataloader_state)
    for module in (*_PPO, _MEGATRON):
        if module in sys.modules:  # verl's trainers are imported before the configuration of their model is read
            _change(sys.modules[module])
    sys.meta_path.insert(0, _LaterImports())
    name, find = "find_latest_ckpt_path", checkpoint_manager.find_latest_ckpt_path
    for importer in [loaded for path, loaded in sys.modules.items() if path.startswith("verl.")]:
        if vars(importer).get(name) is find:
            setattr(importer, name, trainers.find_latest_ckpt_path)


def configure_worker(worker: Worker, settings: State) -> None:
    """Install raystow with the settings of the trainer's process. verl does not import ``model.external_lib`` in each worker."""
    install()
    configure(**settings)


class _LaterImports(importlib.abc.MetaPathFinder):
    """Changes a trainer or manager that is imported after ``install``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        found = fullname in _PPO or fullname == _MEGATRON
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if found else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            with tried("verl", "0.9"):
                _change(module)

        setattr(spec.loader, "exec_module", execute_and_change)  # noqa: B010 (mypy refuses to assign a method)
        return spec


def _change(module: ModuleType) -> None:
    if module.__name__ == _MEGATRON:
        for name in "save_checkpoint", "load_checkpoint":
            setattr(module.MegatronCheckpointManager, name, _of_megatron(getattr(module.MegatronCheckpointManager, name)))
        return
    trainer = getattr(module, _PPO[module.__name__])
    trainer._save_checkpoint = trainers.saving_one_version(trainer._save_checkpoint)
    trainer._load_checkpoint = trainers.loading_ppo(trainer._load_checkpoint, configure_worker)


def _of_megatron(method: Callable[..., None]) -> Callable[..., None]:
    """A method of verl's manager for Megatron, which verl imports wherever Megatron is installed: ours is imported with its first
    use."""

    @functools.wraps(method)
    def call(*args: object, **kwargs: object) -> None:
        with tried("megatron.core", "0.19"):
            from . import megatron_manager
        getattr(megatron_manager, method.__name__)(method, *args, **kwargs)

    return call
