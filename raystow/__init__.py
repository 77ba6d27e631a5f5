"""Checkpoints for training on Ray. This module is the public interface.

``Checkpointer`` needs a Ray cluster. Reading (``open``, ``Repository``, ``Version``, ``restore_latest``) needs neither Ray nor a
GPU. Modules are imported when one of their names is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    import os

    from .orchestrator.client.checkpointer import Checkpointer
    from .orchestrator.client.options import Compression, Memory, Replication
    from .orchestrator.client.pending import Pending
    from .orchestrator.lossy.rules import Blockwise, MantissaBits
    from .orchestrator.lossy.sqnr import Sqnr
    from .orchestrator.sensitivity import sensitivity
    from .storage.errors import (
        ClusterError,
        Damaged,
        DeadlineExceeded,
        Fenced,
        MissingDependency,
        NotARepository,
        NotFound,
        PreconditionFailed,
        RaystowError,
        SaveFailed,
        StateError,
        StoreError,
        StoreUnavailable,
        UnsafeStore,
        Unsupported,
        Untrusted,
    )
    from .storage.repository import Repository
    from .storage.retention.collect import CollectionPlan
    from .storage.retention.plan import RetentionPlan
    from .storage.retention.policy import Policy
    from .storage.version import TensorInfo, Version

__all__ = [
    "Blockwise",
    "Checkpointer",
    "ClusterError",
    "CollectionPlan",
    "Compression",
    "Damaged",
    "DeadlineExceeded",
    "Fenced",
    "MantissaBits",
    "Memory",
    "MissingDependency",
    "NotARepository",
    "NotFound",
    "Pending",
    "Policy",
    "PreconditionFailed",
    "RaystowError",
    "Replication",
    "Repository",
    "RetentionPlan",
    "SaveFailed",
    "Sqnr",
    "StateError",
    "StoreError",
    "StoreUnavailable",
    "TensorInfo",
    "UnsafeStore",
    "Unsupported",
    "Untrusted",
    "Version",
    "latest",
    "open",
    "restore_latest",
    "sensitivity",
]

_MODULES = {
    "Blockwise": "orchestrator.lossy.rules",
    "Checkpointer": "orchestrator.client.checkpointer",
    "CollectionPlan": "storage.retention.collect",
    "Compression": "orchestrator.client.options",
    "MantissaBits": "orchestrator.lossy.rules",
    "Memory": "orchestrator.client.options",
    "Pending": "orchestrator.client.pending",
    "Policy": "storage.retention.policy",
    "Replication": "orchestrator.client.options",
    "Repository": "storage.repository",
    "RetentionPlan": "storage.retention.plan",
    "Sqnr": "orchestrator.lossy.sqnr",
    "TensorInfo": "storage.version",
    "Version": "storage.version",
    "sensitivity": "orchestrator.sensitivity",
}

_SUBMODULES = ("dcp", "huggingface", "lightning", "ray_train")
"""Integrations: each needs the library that it integrates with."""


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in __all__:
        raise AttributeError(f"module 'raystow' has no attribute {name!r}")
    from .storage import extras

    with extras.named():
        return getattr(importlib.import_module(f".{_MODULES.get(name, 'storage.errors')}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES, "__version__"])


def open(uri: str | os.PathLike[str], *, trusted_keys: str | os.PathLike[str] | None = None) -> Repository:
    """Open a repository for reading. Needs neither Ray nor torch nor a GPU.

    Args:
        uri: ``s3://bucket/prefix``, ``file:///path`` or a path. For S3, endpoint, region and credentials come from the usual AWS
            configuration.
        trusted_keys: A file with public keys, or a folder of such files. None: the keys that ``RAYSTOW_TRUSTED_KEYS`` names, else
            those that the repository requires.

    Returns:
        The repository. With trusted keys, reading a version that none of them has signed raises ``Untrusted``.

    Raises:
        NotARepository: There is no repository at ``uri``.
        StoreError: The store cannot be read.
    """
    from .orchestrator.argument_checks import address
    from .storage.repository import open_repository

    return open_repository(address(uri), trusted_keys=trusted_keys)


def latest(uri: str | os.PathLike[str], *, trusted_keys: str | os.PathLike[str] | None = None) -> Version | None:
    """Return the newest version, with one request to the store.

    Args:
        uri: See ``open``.
        trusted_keys: See ``open``.

    Returns:
        The newest version, or None if the repository has none.

    Raises:
        NotARepository: There is no repository at ``uri``.
        StoreError: The store cannot be read.
    """
    from .orchestrator.argument_checks import address
    from .storage.repository import latest_version

    return latest_version(address(uri), trusted_keys=trusted_keys)


def restore_latest(
    uri: str | os.PathLike[str], into: dict[str, Any], *, strict: bool = True, cast: bool = False
) -> Version | None:
    """Fill ``into`` from the newest version, with or without a Ray cluster.

    Rank and world size come from Ray Train or torch.distributed if one is in use. One process alone falls back past a damaged
    version, with an error in the log. Of several ranks each raises ``Damaged``: use ``Checkpointer.restore_latest`` to fall back
    together.

    Args:
        uri: See ``open``.
        into: A state like the one saved. Tensors and arrays are filled in place, of DTensors this rank's shards; other values are
            replaced in the dicts and lists that hold them.
        strict: Whether names that only one side has are an error; else they are left unchanged.
        cast: Whether to convert to the dtypes of ``into``; else another dtype is an error.

    Returns:
        The version, or None if the repository has none.

    Raises:
        StateError: Names, shapes or dtypes do not match. ``into`` is unchanged.
        Damaged: No version is whole.
        NotARepository: There is no repository at ``uri``.
    """
    from .orchestrator.client.rank_discovery import placement
    from .orchestrator.restore.agreement import LocalAgreement
    from .orchestrator.restore.latest import restore_latest as restore
    from .orchestrator.restore.planner import RestoreOptions

    rank, world_size = placement()
    repository = open(uri)
    agreement = LocalAgreement(repository, fall_back=world_size == 1)
    return restore(repository, into, agreement, RestoreOptions(rank, world_size, strict, cast))
