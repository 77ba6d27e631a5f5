"""``install``: lets Megatron's training loop (``megatron.training``) save and load versions.

The loop itself decides what is saved, loaded and when, by its own arguments. Only the functions below it are replaced, in the
modules that call them; ``REPLACED`` names all of them.
"""

from __future__ import annotations

import atexit
import functools
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
from megatron.core.dist_checkpointing.validation import StrictHandling, parse_strict_flag
from megatron.training import async_utils, checkpointing, initialize, training
from torch import distributed

from ...orchestrator.client.checkpointer import Checkpointer
from ...orchestrator.standalone.restore import restore
from ...storage.errors import StateError
from . import plain_objects
from .async_saves import AsyncSave, AsyncSaves
from .checkpoint_folder import METRIC, CheckpointPointer, complete, place_of, pointer_in
from .distributed_optimizer import FORMAT, FORMAT_KEY, torch_optimizers
from .sharded_checkpoint import loading, save
from .sharded_state import COMMON

Wrapped: TypeAlias = Callable[..., Any]
"""A function of Megatron, and what takes its place."""

REPLACED = {
    checkpointing: ("dist_checkpointing", "_build_sharded_state_dict_metadata", "_load_base_checkpoint", "checkpoint_exists"),
    training: ("setup_model_and_optimizer",),
    initialize: ("init_persistent_async_worker",),
    async_utils: ("_async_calls_queue",),
}
"""What is replaced in which module of Megatron."""

_REFUSED: dict[str, tuple[Callable[[object], bool], str]] = {
    "ckpt_format": (lambda value: value != "torch_dist", "use --ckpt-format torch_dist"),
    "non_persistent_ckpt_type": (lambda value: value == "local", "use global: the node's memory has the newest version anyway"),
    "save_retain_interval": (lambda value: value is not None, "pass retention=raystow.Policy(...) to raystow.megatron.install"),
    "dist_ckpt_strictness": (lambda value: str(value).startswith("return"), "use another strictness"),
    "ckpt_convert_format": (bool, "convert without raystow"),
    "use_megatron_fsdp": (bool, "use DistributedOptimizer"),
    "use_torch_fsdp2": (bool, "use DistributedOptimizer"),
    "use_layer_wise_distributed_optimizer": (bool, "use DistributedOptimizer"),
    "use_precision_aware_optimizer": (bool, "leave it out"),
    "optimizer_cpu_offload": (bool, "leave it out"),
    "fp8_param_gather": (bool, "leave it out"),
    "inprocess_restart": (bool, "leave it out: restart the process"),
    "logits_save_dir": (bool, "leave it out: Megatron saves logits in its own queue of asynchronous saves"),
    "moe_use_upcycling": (bool, "convert without raystow, and load the result"),
    "gtp_weight_remat_size": (lambda value: value != 1, "leave out --tensor-parallel-num-weight-shards"),
    "expert_gtp_weight_remat_size": (lambda value: value != 1, "leave out --expert-tensor-parallel-num-weight-shards"),
}
"""Arguments of Megatron by name: when they are refused, and what to do."""


def install(uri: str | os.PathLike[str], **options: Any) -> None:
    """Make Megatron's training loop save to a repository and load from it. Call this before ``pretrain``, on every rank.

    ``--save`` and ``--load`` name a folder as before: Megatron keeps its tracker there, and raystow the names of versions; the
    folder need not be shared by the nodes. A checkpoint that Megatron itself has written is loaded, too.

    Args:
        uri: The repository, see ``raystow.Checkpointer``.
        options: Arguments of ``raystow.Checkpointer``, such as ``retention``.

    Raises:
        StateError: It is installed already. ``pretrain`` raises it, before training begins, for arguments of Megatron that are
            not supported.
        Unsupported: Megatron has changed; the error names the version that was tried.
    """
    for module, names in REPLACED.items():
        for name in names:
            if not hasattr(module, name):
                raise AttributeError(f"{module.__name__} has no {name}")
    if isinstance(checkpointing.dist_checkpointing, _Versions):
        raise StateError("raystow.megatron is installed already", subject=str(uri), remedy="call install once")
    versions = _Versions(uri, options)
    checkpointing.dist_checkpointing = versions
    for name in REPLACED[checkpointing][1:]:
        setattr(checkpointing, name, getattr(versions, name.lstrip("_"))(getattr(checkpointing, name)))
    training.setup_model_and_optimizer = versions.setup_model_and_optimizer(training.setup_model_and_optimizer)
    initialize.init_persistent_async_worker = lambda *args, **kwargs: None  # no process is needed
    async_utils._async_calls_queue = AsyncSaves()


class _Versions:
    """Takes the place of the package ``dist_checkpointing`` in Megatron's training loop, and wraps functions around it."""

    def __init__(self, uri: str | os.PathLike[str], options: dict[str, Any]) -> None:
        self._uri, self._options = uri, options

    def __getattr__(self, name: str) -> object:
        return getattr(dist_checkpointing, name)

    @functools.cached_property
    def _checkpointer(self) -> Checkpointer:
        made = Checkpointer(self._uri, **self._options)
        atexit.register(made.close)
        return made

    def save(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: str,
        sharded_strategy: object = None,
        *,
        async_sharded_save: bool = False,
        content_metadata: dict[str, object] | None = None,
        **_: object,
    ) -> AsyncSave | None:
        """Save a version, and then the files that name it. Without ``async_sharded_save`` this waits for the commit."""
        metrics = {METRIC: place_of(checkpoint_dir)}
        step = int(sharded_state_dict["iteration"])
        pending = save(
            self._checkpointer, sharded_state_dict, step=step, metrics=metrics, content_metadata=content_metadata or {}
        )

        def name_version() -> None:
            if distributed.get_rank() == 0:
                CheckpointPointer(self._checkpointer.uri, pending.result().id).write(Path(checkpoint_dir))

        if async_sharded_save:
            return AsyncSave(pending, [name_version])
        pending.result()
        name_version()
        return None

    def load(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: str,
        *args: object,
        strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
        **kwargs: object,
    ) -> StateDict:
        """Load the version that the files name."""
        pointer = pointer_in(checkpoint_dir)
        if pointer is None:
            return dist_checkpointing.load(sharded_state_dict, checkpoint_dir, *args, strict=strict, **kwargs)
        strict = parse_strict_flag(strict)
        tolerant = StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL, StrictHandling.IGNORE_ALL
        missing, unused = "*" if strict in tolerant else (), () if strict is StrictHandling.RAISE_ALL else "*"
        loaded = loading(pointer.repository, sharded_state_dict, pointer.version)
        if pointer.repository == self._checkpointer.uri:
            self._checkpointer.restore(loaded.into, pointer.version, allow_missing=missing, allow_unused=unused)
        else:  # of another run, in which these processes are no ranks
            restore(pointer.repository, loaded.into, pointer.version, allow_missing=missing, allow_unused=unused)
        return loaded.result()

    def load_common_state_dict(self, checkpoint_dir: str) -> StateDict:
        """The common state alone: Megatron decides by it what it loads."""
        pointer = pointer_in(checkpoint_dir)
        if pointer is None:
            return dist_checkpointing.load_common_state_dict(checkpoint_dir)
        return plain_objects.decode(pointer.open().read(COMMON))

    def build_sharded_state_dict_metadata(self, of_megatron: Wrapped) -> Wrapped:
        @functools.wraps(of_megatron)
        def build(*args: object, **kwargs: object) -> object:
            metadata = of_megatron(*args, **kwargs)
            return {**metadata, FORMAT_KEY: FORMAT} if FORMAT_KEY in metadata else metadata

        return build

    def load_base_checkpoint(self, of_megatron: Wrapped) -> Wrapped:
        @functools.wraps(of_megatron)
        def load(load_dir: str | None, args: Namespace, *more: object, **kwargs: object) -> object:
            if load_dir is not None:
                complete(load_dir, self._address, getattr(args, "ckpt_step", None))
            if args.non_persistent_ckpt_type == "global":
                folder = args.non_persistent_global_ckpt_dir or os.path.join(
                    load_dir or "", checkpointing._NON_PERSISTENT_CKPT_SUBDIR
                )
                complete(folder, self._address)
            return of_megatron(load_dir, args, *more, **kwargs)

        return load

    def checkpoint_exists(self, of_megatron: Wrapped) -> Wrapped:
        @functools.wraps(of_megatron)
        def exists(path: str | None) -> object:
            if path is not None:
                complete(path, self._address)
            return of_megatron(path)

        return exists

    def setup_model_and_optimizer(self, of_megatron: Wrapped) -> Wrapped:
        @functools.wraps(of_megatron)
        def setup(*args: object, **kwargs: object) -> object:
            check_arguments(training.get_args())
            checkpointer = self._checkpointer  # starts while the model is made
            model, optimizer, *rest = of_megatron(*args, **kwargs)
            for inner in torch_optimizers(optimizer):
                checkpointer.guard(inner)
            return (model, optimizer, *rest)

        return setup

    @property
    def _address(self) -> str:
        return os.fspath(self._uri)


def check_arguments(args: Namespace) -> None:
    """``StateError`` for an argument of Megatron that is not supported."""
    for name, (refused, remedy) in _REFUSED.items():
        value = getattr(args, name, None)
        if value is not None and refused(value):
            raise StateError(f"--{name.replace('_', '-')} {value} is not supported", subject="raystow.megatron", remedy=remedy)
