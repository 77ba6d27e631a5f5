"""What one process contributes to versions: the parts of its checkpoint managers, saved together by one ``Checkpointer``.

verl's trainers call the managers of the actor and the critic one after the other, and write the state of the data loader last. A
part is only collected when a manager is called; the version is saved when all parts and files are there, so that none is ahead
of another.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ...orchestrator.client.checkpointer import Checkpointer
from ...state.tree import State
from ...storage.errors import StateError
from ...storage.retention.policy import Policy
from .settings import options
from .step_folder import FILES, read_files, state_of_files

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoleState:
    """The state of a role: "actor", "critic", or "" if the training has only one. ``device``: where the model was when the state
    was taken. ``keep``: verl's ``max_ckpt_to_keep``."""

    role: str
    step: int
    state: State
    model: torch.nn.Module
    device: torch.device
    optimizers: tuple[torch.optim.Optimizer, ...]
    keep: int | None


@dataclass(frozen=True)
class Commit:
    """Asks each process to save its parts as one version. ``folder``: of the step. ``files``: those of the trainer's process, for
    rank 0. ``wait``: until the version is durable."""

    uri: str
    step: int
    roles: tuple[str, ...]
    folder: Path
    files: Mapping[str, bytes] = field(default_factory=dict)
    wait: bool = False


class RunCheckpointer(Checkpointer):
    """A ``Checkpointer`` whose retention policy may change, since verl tells it with each save."""

    def keep_last(self, versions: int | None) -> None:
        if "retention" not in options():
            self._settings = replace(self._settings, retention=Policy(keep_last=versions) if versions else None)


class TrainingProcess:
    """The parts of this process, and its ``Checkpointer`` for each repository: usually one."""

    def __init__(self) -> None:
        self._parts: dict[str, RoleState] = {}
        self._checkpointers: dict[str, RunCheckpointer] = {}
        self._guarded = weakref.WeakSet[torch.optim.Optimizer]()
        atexit.register(self.close)

    def checkpointer(self, uri: str) -> RunCheckpointer:
        """The ``Checkpointer`` of a repository, made at the first call."""
        if uri not in self._checkpointers:
            self._checkpointers[uri] = RunCheckpointer(uri, **options())
        return self._checkpointers[uri]

    def add(self, part: RoleState) -> None:
        """Collect a part. The optimizers' steps wait from now on until saved tensors have been read."""
        self._check_committed(part.step)
        self._parts[part.role] = part
        for optimizer in part.optimizers:
            if optimizer not in self._guarded:
                optimizer.register_step_pre_hook(self._fence)
                self._guarded.add(optimizer)

    def commit(self, commit: Commit) -> None:
        """Start to save the collected parts and the files as one version."""
        self._check_committed(commit.step)
        parts, self._parts = self._parts, {}
        if missing := [role for role in commit.roles if role not in parts]:
            what = f"this process has no part {missing} of it: that is saved by verl itself, or in other processes"
            raise StateError(
                what, subject=f"step {commit.step}", remedy="set model.external_lib=raystow.verl for the actor's model"
            )
        found, tree = [parts[role] for role in commit.roles], State()
        for part in found:
            tree |= {part.role: part.state} if part.role else part.state
        checkpointer = self.checkpointer(commit.uri)
        if checkpointer.rank == 0:
            tree[FILES] = state_of_files({**_files(commit), **commit.files})
        checkpointer.keep_last(max(part.keep or 0 for part in found))
        pending = checkpointer.save(tree, step=commit.step)
        if commit.wait:
            pending.result()
        elif any(_device(part.model) != part.device for part in found):
            checkpointer.fence()  # verl has moved the model to host memory: only this save still needs the memory of the device

    def close(self) -> None:
        """Wait for the saves in flight."""
        if self._parts:
            logger.error("step %d is not saved: the trainer has not finished its save", next(iter(self._parts.values())).step)
        with contextlib.ExitStack() as closing:
            for checkpointer in self._checkpointers.values():
                closing.callback(checkpointer.close)

    def _fence(self, *_: object) -> None:
        for checkpointer in self._checkpointers.values():
            checkpointer.fence()

    def _check_committed(self, step: int) -> None:
        for part in self._parts.values():
            if part.step != step:
                what = (
                    "was not saved: this trainer of verl does not finish its saves as RayPPOTrainer, PPOTrainer and SFTTrainer do"
                )
                raise StateError(what, subject=f"step {part.step}", remedy="use one of these, or verl's own checkpoints")


def _device(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


def _files(commit: Commit) -> dict[str, bytes]:
    """What the managers of this process wrote, by its path in the folder of the step."""
    prefixes = {role: f"{role}/" if role else "" for role in commit.roles}
    return {
        prefix + name: content for role, prefix in prefixes.items() for name, content in read_files(commit.folder / role).items()
    }


PROCESS = TrainingProcess()
