"""Saving and loading by verl's ``MegatronCheckpointManager``: its sharded states become parts of versions, without a gather.

verl itself decides what is saved and loaded; only what it writes to a folder and reads from it goes through a repository. Weights
are stored as Megatron's shards, also where verl would gather them to files of Hugging Face.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
from megatron.core.distributed import DistributedDataParallel
from verl.utils.checkpoint import megatron_checkpoint_manager as of_verl
from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

from ...state.box import Boxes
from ...state.tree import State
from ...storage.errors import StateError
from ...storage.extras import check_methods
from ...storage.repository import open_repository
from ..megatron.distributed_optimizer import FORMAT, FORMAT_KEY, replace_methods, torch_optimizers
from ..megatron.replicas import Replicas
from ..megatron.sharded_state import loaded_state, saved_tree
from .settings import repository_of
from .step_folder import find_step_folder, step_folder
from .training_process import PROCESS, RoleState

logger = logging.getLogger(__name__)

_METHODS = "_build_sharded_state_dict_metadata", "_load_content_metadata", "_save_dist_checkpoint", "get_rng_state"
check_methods(MegatronCheckpointManager, _METHODS)
of_verl.load_dist_checkpointing  # noqa: B018  named if it has moved
replace_methods()

_replicas = functools.cache(Replicas)
"""Of this process: its first save makes a process group."""


def save_checkpoint(
    save: Callable[..., None],
    manager: MegatronCheckpointManager,
    local_path: str,
    hdfs_path: str | None = None,
    global_step: int = 0,
    max_ckpt_to_keep: int | None = None,
) -> None:
    """Collect this manager's part of the next version. ``save``: verl's method, which writes small files."""
    found = find_step_folder(local_path)
    if found is None:
        if manager.rank == 0:
            logger.warning("%s is in no folder global_step_N: verl itself saves it, and raystow does not", local_path)
        save(manager, local_path, hdfs_path, global_step, max_ckpt_to_keep)
        return
    (folder, role), state = found, State()

    def collect(path: str, sharded: ShardedStateDict) -> None:
        state[_part(path)] = saved_tree(sharded, _replicas())

    with _redirected(manager, collect, of_verl.load_dist_checkpointing):
        save(manager, local_path, hdfs_path, global_step, max_ckpt_to_keep)
    if "model" in state and _offloaded(manager):
        state["model"] = {name: _copied(leaf) for name, leaf in state["model"].items()}
    device, optimizers = next(manager.model[0].parameters()).device, torch_optimizers(manager.optimizer)
    PROCESS.add(RoleState(role, folder.step, state, manager.model[0], device, optimizers, max_ckpt_to_keep))


def load_checkpoint(
    load: Callable[..., None],
    manager: MegatronCheckpointManager,
    local_path: str | None,
    hdfs_path: str | None = None,
    del_local_after_load: bool = False,
) -> None:
    """Restore this manager's part of the version that the path names, from any layout. ``load``: verl's method."""
    if local_path is None:
        return
    if any(Path(local_path).glob("*/dist_ckpt/metadata.json")):  # a checkpoint of verl itself
        load(manager, local_path, hdfs_path, del_local_after_load)
        return
    folder, role = step_folder(local_path)
    uri = repository_of(folder.root)
    version = open_repository(uri).version(folder.selector)
    tensors = version.tensors()

    def restore(sharded_state_dict: ShardedStateDict, ckpt_dir: str) -> StateDict:
        part = _part(ckpt_dir)
        prefix = ".".join(filter(None, (role, part, "")))
        loaded = loaded_state(sharded_state_dict, lambda name: tensors[at].shape if (at := prefix + name) in tensors else None)
        into = {part: loaded.into}
        PROCESS.checkpointer(uri).restore({role: into} if role else into, version.id, allow_unused="*")
        return loaded.result()

    contents = list(manager.checkpoint_load_contents)
    generators = ".".join(filter(None, (role, "extra", manager.get_rng_state().unique_key)))
    if "extra" in contents and generators not in tensors:
        logger.info("random generators are not restored: tensor or pipeline parallel sizes are not those of the save")
        manager.checkpoint_load_contents = [content for content in contents if content != "extra"]
    try:
        with _redirected(manager, manager._save_dist_checkpoint, restore):
            load(manager, local_path, hdfs_path, del_local_after_load)
    finally:
        manager.checkpoint_load_contents = contents


@contextlib.contextmanager
def _redirected(
    manager: MegatronCheckpointManager,
    save: Callable[[str, ShardedStateDict], None],
    load: Callable[[ShardedStateDict, str], StateDict],
) -> Iterator[None]:
    """Let the methods of a manager save and load sharded states by these functions, and describe them by parameters."""
    if manager.use_megatron_fsdp or manager.peft_cls is not None:
        what = "Megatron-FSDP is" if manager.use_megatron_fsdp else "adapters in Megatron are"
        raise StateError(f"{what} not supported", subject="raystow.verl", remedy="use verl's own checkpoints")
    metadata = manager._build_sharded_state_dict_metadata()
    metadata |= {FORMAT_KEY: FORMAT} if FORMAT_KEY in metadata else {}
    own = {"_build_sharded_state_dict_metadata": lambda: metadata, "_load_content_metadata": lambda path: metadata}
    shards, of_folders = manager.use_dist_checkpointing, of_verl.load_dist_checkpointing
    vars(manager).update(own, _save_dist_checkpoint=save, use_dist_checkpointing=True)
    of_verl.load_dist_checkpointing = load
    try:
        yield
    finally:
        of_verl.load_dist_checkpointing = of_folders
        for name in (*own, "_save_dist_checkpoint"):
            del vars(manager)[name]
        manager.use_dist_checkpointing = shards


def _part(path: str) -> str:
    """What verl saves in a folder ``<part>/dist_ckpt``: "model", "optimizer" or "extra"."""
    return Path(path).parent.name


def _offloaded(manager: MegatronCheckpointManager) -> bool:
    """Whether verl moves the weights to host memory when this save returns: it frees their memory on the device then."""
    chunks = [chunk for chunk in manager.model if isinstance(chunk, DistributedDataParallel)]
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    return any(getattr(buffer.param_data, "cpu_data", None) is not None for buffer in buffers)


def _copied(leaf: object) -> object:
    if not isinstance(leaf, Boxes):
        return leaf
    return Boxes(tuple(replace(box, local=torch.as_tensor(box.local).to("cpu", copy=True)) for box in leaf.boxes))
