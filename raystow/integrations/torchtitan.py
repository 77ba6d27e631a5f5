"""A checkpoint manager for TorchTitan that saves versions to a repository and loads them from it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torchtitan.components import checkpoint
from torchtitan.components.checkpoint import AsyncMode
from torchtitan.tools import filesystem
from torchtitan.tools.utils import GarbageCollection

from ..orchestrator.argument_checks import address
from ..state.tree import State
from ..storage.errors import NotARepository
from ..storage.extras import check_methods
from ..storage.repository import latest_version
from ..storage.retention.policy import Policy
from ..storage.versions.version import Version
from .dcp import Reader, Writer

_OVERRIDDEN = ("dcp_save", "_load", "_find_load_step", "_purge_stale_checkpoints", "_states_to_load")
check_methods(checkpoint.CheckpointManager, _OVERRIDDEN)


class CheckpointManager(checkpoint.CheckpointManager):
    """Save to a repository instead of folders: use its ``Config`` in place of that of TorchTitan's ``CheckpointManager``.

    All options keep their meaning. ``folder`` is the repository: an address such as ``s3://bucket/runs/llama``, or a path
    relative to the dump folder. ``keep_latest_k`` becomes its retention policy. ``initial_load_path`` may be a repository, too.
    With ``last_save_in_hf`` the Hugging Face files are in ``<folder>-hf``.

    Example:
        >>> checkpoint = raystow.torchtitan.CheckpointManager.Config(enable=True, folder="s3://bucket/runs/llama", interval=500)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(checkpoint.CheckpointManager.Config):
        """The options of TorchTitan's ``CheckpointManager``."""

    def __init__(self, config: Config, **parts: Any) -> None:
        if config.enable:
            address(config.folder)  # refuses a mistyped one, which TorchTitan would put below the dump folder
        super().__init__(config, **parts)
        if self.enable:
            self._uri: str = address(self.folder)
            self._retention = Policy(keep_last=self.keep_latest_k) if self.keep_latest_k else None
            self.folder: str = ""  # so that a ``checkpoint_id`` is "step-7", and no local folder is searched

    @torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not typed here
    def dcp_save(
        self,
        state_dict: State,
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[None] | AsyncSaveResponse | None:
        """Save a state as a version."""
        if to_hf:
            folder = filesystem.join(f"{self._uri.removeprefix('file://')}-hf", checkpoint_id)
            return super().dcp_save(state_dict, folder, async_mode, enable_garbage_collection, to_hf)
        done: Future[None] | AsyncSaveResponse | None = None
        to = {"storage_writer": Writer(self._uri, retention=self._retention), "checkpoint_id": checkpoint_id}
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, **to)
        elif async_mode == AsyncMode.ASYNC:
            done = dcp.async_save(state_dict, **to, process_group=self.pg)
        else:
            by = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS, "async_stager": self.stager}
            done = dcp.async_save(state_dict, **to, process_group=self.pg, **by)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return done

    def _load(self, step: int = -1) -> bool:
        found = self._find_load_step() if step == -1 else step
        if found != -1:
            reader, states = Reader(self._uri, f"step:{found}"), self._states_to_load(model_only=found == 0)
        elif self.initial_load_path and _newest(self.initial_load_path) is not None:
            reader = Reader(self.initial_load_path, cast=True)  # TorchTitan converts, and has no option for it
            states = self._states_to_load(self.initial_load_model_only)
        else:
            return bool(super()._load())  # from other files, or not at all
        dcp.load(states, storage_reader=reader)
        self.states[checkpoint.MODEL].load_state_dict(states)
        GarbageCollection.collect("GC collection for checkpoint loading.")
        return True

    def _find_load_step(self, folder: str = "") -> int:
        version = _newest(folder or self._uri)
        return -1 if version is None else version.step

    def _purge_stale_checkpoints(self) -> None:
        """Do nothing: each save applies the retention policy."""


def _newest(uri: str) -> Version | None:
    try:
        return latest_version(uri)
    except NotARepository:
        return None
