"""``save`` and ``load``: what ``dist_checkpointing`` of Megatron-Core does, with versions of a repository."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
from torch import distributed

from ...orchestrator.client.checkpointer import Checkpointer
from ...orchestrator.client.pending import Pending
from ...storage.errors import NotARepository, StateError
from ...storage.repository import open_repository
from ...storage.versions.version import TensorInfo
from ...storage.versions.version_selector import LATEST, VersionSelector
from .replicas import Replicas
from .sharded_state import CONTENT, LoadedState, loaded_state, saved_tree

_replicas = weakref.WeakKeyDictionary[Checkpointer, Replicas]()


def save(
    checkpointer: Checkpointer,
    sharded_state_dict: ShardedStateDict,
    *,
    step: int,
    metrics: Mapping[str, object] | None = None,
    content_metadata: Mapping[str, object] | None = None,
) -> Pending:
    """Start to save a sharded state of Megatron-Core as a version. Every rank calls this.

    Nothing is gathered: each rank stores its own parts, of a ``DistributedOptimizer`` its flat ranges as boxes of the parameters.
    Call ``checkpointer.fence()`` before the optimizer's next step.

    Args:
        checkpointer: Made with the ranks of ``torch.distributed``.
        sharded_state_dict: As for ``dist_checkpointing.save``. The state of a ``DistributedOptimizer`` has the format
            ``fully_sharded_model_space``, its default.
        step: See ``Checkpointer.save``.
        metrics: See ``Checkpointer.save``.
        content_metadata: As for ``dist_checkpointing.save``.

    Returns:
        The save in flight.

    Raises:
        StateError: The state of a rank cannot be stored, or ranks store different tensors under one name. Raised on all ranks.
    """
    if (checkpointer.rank, checkpointer.world_size) != (distributed.get_rank(), distributed.get_world_size()):
        raise StateError("the Checkpointer has other ranks than torch.distributed", remedy="make it without rank and world_size")
    if checkpointer not in _replicas:
        _replicas[checkpointer] = Replicas()
    if content_metadata is not None:
        sharded_state_dict = {**sharded_state_dict, CONTENT: dict(content_metadata)}
    tree = saved_tree(sharded_state_dict, _replicas[checkpointer])
    return checkpointer.save(tree, step=step, metrics=metrics)


def load(
    checkpointer: Checkpointer, sharded_state_dict: ShardedStateDict, version: VersionSelector = LATEST, *, strict: bool = True
) -> StateDict | None:
    """Load a version into a sharded state of Megatron-Core. Every rank calls this.

    The tensors of the state are filled in place, from any layout. Pass the result to ``load_state_dict`` of model and optimizer,
    as that of ``dist_checkpointing.load``.

    Args:
        checkpointer: See ``save``.
        sharded_state_dict: As for ``dist_checkpointing.load``; that of the optimizer with ``is_loading=True``.
        version: See ``Checkpointer.restore``.
        strict: Whether the version must have all tensors and objects of the state.

    Returns:
        The state with the common state of the version; None if the latest version is asked for and there is none.

    Raises:
        StateError: The version lacks a part of the state, or has it in another shape or dtype.
        NotFound: There is no such version.
        Damaged: The version is damaged. The content of the tensors is undefined.
    """
    loaded = loading(checkpointer.uri, sharded_state_dict, version)
    missing = () if strict else "*"
    if checkpointer.restore(loaded.into, version, allow_missing=missing, allow_unused="*") is None:
        return None
    return loaded.result()


def loading(uri: str, state: ShardedStateDict, version: VersionSelector) -> LoadedState:
    """Prepare to load a version of a repository."""

    @functools.cache
    def tensors() -> Mapping[str, TensorInfo]:
        try:
            repository = open_repository(uri)
        except NotARepository:
            return {}
        found = repository.latest() if version == LATEST else repository.version(version)
        return {} if found is None else found.tensors()

    return loaded_state(state, lambda name: tensors()[name].shape if name in tensors() else None)
