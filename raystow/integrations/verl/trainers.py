"""What verl's trainers do after a save and before a load: one version for all parts, and the newest version to resume from."""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from torch import distributed
from verl.utils.checkpoint.checkpoint_handler import CheckpointHandler, OrchestrationMode

from ...state.tree import State
from ...storage.errors import NotARepository, NotFound
from ...storage.real_paths import input_path
from ...storage.repository import latest_version, open_repository
from ...storage.versions.version import Version
from .settings import local_dir, repository_of, settings
from .step_folder import read_files, restored_folder, step_folder, write_files
from .training_process import PROCESS, Commit

if TYPE_CHECKING:
    from verl.single_controller import Worker, WorkerGroup
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

logger = logging.getLogger(__name__)

ConfigureWorker: TypeAlias = "Callable[[Worker, State], None]"
"""Loads raystow with the settings of the trainer's process in that of a worker."""

_DATA = "data_0.pt"
"""The state of the data loader of rank 0 in a supervised training, which is that of all ranks."""


def saving_one_version(save: Callable[[RayPPOTrainer], None]) -> Callable[[RayPPOTrainer], None]:
    """``_save_checkpoint`` of a PPO trainer."""

    @functools.wraps(save)
    def save_checkpoint(self: RayPPOTrainer) -> None:
        save(self)
        roles = ("actor", "critic") if self.use_critic else ("actor",)
        commit = _commit(self.config.trainer.default_local_dir, self.global_steps, roles)
        files = read_files(commit.folder, skip=roles)
        _ask(self.actor_rollout_wg, replace(commit, files=files, wait=self.global_steps >= self.total_training_steps))

    return save_checkpoint


def saving_one_version_of_sft(save: Callable[[CheckpointHandler, int], None]) -> Callable[[CheckpointHandler, int], None]:
    """``save_checkpoint`` of the ``CheckpointHandler`` of the trainers of supervised fine-tuning."""

    @functools.wraps(save)
    def save_checkpoint(self: CheckpointHandler, step: int) -> None:
        save(self, step)
        commit = _commit(self.default_local_dir, step, ("",))
        if self.mode == OrchestrationMode.SPMD:
            PROCESS.commit(commit)
        else:
            _ask(self.engine, replace(commit, files=read_files(commit.folder)))

    return save_checkpoint


def loading_ppo(load: Callable[[RayPPOTrainer], None], configure_worker: ConfigureWorker) -> Callable[[RayPPOTrainer], None]:
    """``_load_checkpoint`` of a PPO trainer."""

    @functools.wraps(load)
    def load_checkpoint(self: RayPPOTrainer) -> None:
        local_dir(self.config.trainer.default_local_dir)
        _each(self.actor_rollout_wg, configure_worker, [settings()] * self.actor_rollout_wg.world_size)
        if self.config.trainer.resume_mode == "resume_path":
            fetch_files(self.config.trainer.resume_from_path)
        load(self)

    return load_checkpoint


def loading_sft(
    load: Callable[[CheckpointHandler], int], configure_worker: ConfigureWorker
) -> Callable[[CheckpointHandler], int]:
    """``load_checkpoint`` of the ``CheckpointHandler``."""

    @functools.wraps(load)
    def load_checkpoint(self: CheckpointHandler) -> int:
        if self.mode == OrchestrationMode.RAY:
            _each(self.engine, configure_worker, [settings()] * self.engine.world_size)
        local_dir(self.default_local_dir).mkdir(parents=True, exist_ok=True)  # without it verl looks for no checkpoint
        if self.resume_mode != "disable" and self.resume_from_path is not None:
            fetch_files(self.resume_from_path)
        return load(self)

    return load_checkpoint


def loading_data(load: Callable[[CheckpointHandler, str], None]) -> Callable[[CheckpointHandler, str], None]:
    """``_load_dataloader_state`` of the ``CheckpointHandler``. Each rank has a data loader of its own, whose state counts samples
    of the rank: with another number of ranks, the same number of batches is another number of samples."""

    @functools.wraps(load)
    def load_dataloader_state(self: CheckpointHandler, checkpoint_path: str) -> None:
        load(self, checkpoint_path)
        data, state = self.train_dataloader, self.train_dataloader.next_iter_state
        if self.mode == OrchestrationMode.SPMD and state is not None and _resharded(checkpoint_path):
            at = state["_snapshot"]["_main_snapshot"] if "_snapshot" in state else state
            at["_sampler_iter_state"] = {"samples_yielded": at["_sampler_iter_yielded"] * data.batch_size}

    return load_dataloader_state


def find_latest_ckpt_path(path: str | None, directory_format: str = "global_step_{}") -> str | None:
    """Restore the files of the newest version to a folder, and return its path; None if there is no version. All ranks get the
    same one. verl's tracker file is not read: it may name a save that did not become durable."""
    if path is None:
        return None
    uri = repository_of(path)
    newest = [_newest(uri) if not distributed.is_initialized() or distributed.get_rank() == 0 else None]
    if distributed.is_initialized():
        distributed.broadcast_object_list(newest, 0)
    if newest[0] is None:
        logger.info("%s has no version yet", uri)
        return None
    version = open_repository(uri).version(newest[0])
    folder = restored_folder(path, version)
    _restore_files(version, folder)
    return str(folder)


def fetch_files(path: str) -> None:
    """Restore the files of a step to its folder, if the repository has a version of it; else the folder is one of verl itself."""
    version = _version_of(path)
    if version is None:
        logger.info("no version of %s: taken as a checkpoint of verl itself", path)
    else:
        _restore_files(version, step_folder(path)[0].path)


def commit_here(worker: Worker, commit: Commit) -> None:
    """Save the parts of a worker's process. verl calls it in each worker."""
    PROCESS.commit(commit)


def _ask(workers: WorkerGroup, commit: Commit) -> None:
    """Let each worker commit. Only that of rank 0 gets the files."""
    _each(workers, commit_here, [commit, *[replace(commit, files={})] * (workers.world_size - 1)])


def _each(workers: WorkerGroup, function: Callable[..., None], arguments: Sequence[object]) -> None:
    """Call a function in the process of each worker, with the argument of its rank."""
    workers.execute_all_sync("execute_with_func_generator", [function] * len(arguments), list(arguments))


def _commit(root: str, step: int, roles: tuple[str, ...]) -> Commit:
    folder = Path(root).absolute() / f"global_step_{step}"
    return Commit(repository_of(root), step, roles, folder)


def _newest(uri: str) -> int | None:
    try:
        version = latest_version(uri)
    except NotARepository:
        return None
    return None if version is None else version.id


def _resharded(path: str) -> bool:
    version = _version_of(path)
    return version is not None and version.world_size != distributed.get_world_size()


def _version_of(path: str) -> Version | None:
    """The version of which a path names the step; None if the repository has none."""
    folder, _ = step_folder(path)
    try:
        return open_repository(repository_of(folder.root)).version(folder.selector)
    except (NotARepository, NotFound):
        return None


def _restore_files(version: Version, folder: Path) -> None:
    write_files(version, folder)
    data = folder / _DATA
    if data.exists() and distributed.is_initialized():
        for rank in range(1, distributed.get_world_size()):
            shutil.copyfile(data, input_path(folder, f"data_{rank}.pt"))
