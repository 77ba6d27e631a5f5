"""Saving and loading by verl's ``FSDPCheckpointManager``: what its two methods do instead of writing a file for each rank."""

from __future__ import annotations

import logging
from pathlib import Path

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from ...state.rng import Rng
from ...state.tree import State
from ...storage.errors import StateError
from ...storage.repository import open_repository
from .settings import repository_of
from .step_folder import find_step_folder, step_folder
from .training_process import PROCESS, RoleState

logger = logging.getLogger(__name__)

_verl_save, _verl_load = FSDPCheckpointManager.save_checkpoint, FSDPCheckpointManager.load_checkpoint


def save_checkpoint(
    self: FSDPCheckpointManager,
    local_path: str | None,
    hdfs_path: str | None = None,
    global_step: int = 0,
    max_ckpt_to_keep: int | None = None,
) -> None:
    """Collect this manager's part of the next version. verl itself writes the small files: config, tokenizer, and for
    ``hf_model`` the whole model. Outside of the folders of steps, which a trainer completes, it writes everything."""
    if local_path is None:
        return
    found = find_step_folder(local_path)
    if found is None:
        if self.rank == 0:
            logger.warning("%s is in no folder global_step_N: verl itself saves it, and raystow does not", local_path)
        _verl_save(self, local_path, hdfs_path, global_step, max_ckpt_to_keep)
        return
    folder, role = found
    contents = list(self.checkpoint_save_contents)
    self.checkpoint_save_contents = [content for content in contents if content == "hf_model"]
    try:
        _verl_save(self, local_path, hdfs_path, global_step, max_ckpt_to_keep)
    finally:
        self.checkpoint_save_contents = contents
    device = next(self.model.parameters()).device
    state = _state(self, contents, adapters_only=self.should_save_lora_only and self._has_lora())
    optimizers = () if self.optimizer is None else (self.optimizer,)
    PROCESS.add(RoleState(role, folder.step, state, self.model, device, optimizers, max_ckpt_to_keep))


def load_checkpoint(
    self: FSDPCheckpointManager, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False
) -> None:
    """Restore this manager's part of the version that the path names, from any number of ranks."""
    if local_path is None:
        return
    if any(Path(local_path).glob("*_world_size_*_rank_*.pt")):  # a checkpoint of verl itself
        _verl_load(self, local_path, hdfs_path, del_local_after_load)
        return
    folder, role = step_folder(local_path)
    uri = repository_of(folder.root)
    version = open_repository(uri).version(folder.selector)
    weights = f"{role}.model." if role else "model."
    saved = [name for name in version.tensors() if name.startswith(weights)]
    adapters_only = bool(saved) and all(_is_adapter(name) for name in saved)
    state = _state(self, self.checkpoint_load_contents, adapters_only=adapters_only)
    moments = f"{role}.optim.state" if role else "optim.state"
    # A parameter may have no state: it got no gradient yet, or its optimizer needs none.
    initial = moments if any(name.startswith(f"{moments}.") for name in version.tensors()) else ()
    try:
        PROCESS.checkpointer(uri).restore({role: state} if role else state, version.id, allow_missing=initial, allow_unused="*")
    except StateError as error:
        if "not saved" not in error.what:
            raise
        remedy = "use the same model, or set checkpoint.load_contents to what it has"
        raise StateError(error.what, subject=error.subject, remedy=remedy) from error
    if "model" in state:
        set_model_state_dict(self.model, state["model"], options=StateDictOptions(strict=not adapters_only))
    if "optim" in state:
        set_optimizer_state_dict(self.model, self.optimizer, state["optim"], options=StateDictOptions(strict=False))


def _state(manager: FSDPCheckpointManager, contents: list[str], *, adapters_only: bool) -> State:
    """What a part consists of, to save or to restore into. Weights and moments are gathered here: FSDP of version 1, which verl
    uses by default, does it by collectives."""
    model, state = manager.model, State()
    if "model" in contents:
        weights, buffers = get_model_state_dict(model), {name for name, _ in model.named_buffers()}
        state["model"] = {
            name: weight.clone() if name in buffers else weight  # buffers change before the optimizer step
            for name, weight in weights.items()
            if not adapters_only or _is_adapter(name)
        }
    if "optimizer" in contents:
        state["optim"] = get_optimizer_state_dict(model, manager.optimizer)
    if "extra" in contents:
        state["extra"] = {"rng": Rng()}
        if manager.lr_scheduler is not None:
            state["extra"]["lr_scheduler"] = manager.lr_scheduler
    return state


def _is_adapter(name: str) -> bool:
    """Whether a weight is of LoRA, as verl's ``is_lora_only_state_dict`` tells it."""
    return "lora_" in name or ".adapter_" in name
