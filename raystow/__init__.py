"""raystow: checkpoints for training on Ray. This module is the whole public API.

Reading (``open``, ``Repository``, ``Version``, ``restore_latest``) needs neither Ray nor a GPU; ``Checkpointer`` needs a Ray
cluster. What is heavy is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    import os

    from .orchestrator.client import Checkpointer
    from .orchestrator.lossy.rules import Blockwise, MantissaBits
    from .orchestrator.lossy.sqnr import Sqnr
    from .orchestrator.pending import Pending
    from .orchestrator.sensitivity import sensitivity
    from .storage.errors import (
        ClusterError,
        Damaged,
        DeadlineExceeded,
        Fenced,
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
    "Damaged",
    "DeadlineExceeded",
    "Fenced",
    "MantissaBits",
    "NotARepository",
    "NotFound",
    "Pending",
    "Policy",
    "PreconditionFailed",
    "RaystowError",
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

_HOMES = {
    "Blockwise": "orchestrator.lossy.rules",
    "Checkpointer": "orchestrator.client",
    "CollectionPlan": "storage.retention.collect",
    "MantissaBits": "orchestrator.lossy.rules",
    "Pending": "orchestrator.pending",
    "Policy": "storage.retention.policy",
    "Repository": "storage.repository",
    "RetentionPlan": "storage.retention.plan",
    "Sqnr": "orchestrator.lossy.sqnr",
    "TensorInfo": "storage.version",
    "Version": "storage.version",
    "sensitivity": "orchestrator.sensitivity",
}

_DOORS = ("dcp", "lightning", "ray_train", "transformers")
"""Modules of their own for those who use other tools, since each needs its tool."""


def __getattr__(name: str) -> Any:
    if name in _DOORS:
        return importlib.import_module(f".{name}", __name__)
    if name not in __all__:
        raise AttributeError(f"module 'raystow' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES.get(name, 'storage.errors')}", __name__), name)


def open(uri: str | os.PathLike[str], *, trusted_keys: str | os.PathLike[str] | None = None) -> Repository:
    """Open the repository at ``uri`` (``s3://bucket/prefix``, ``file:///path`` or a path) for reading.

    ``trusted_keys``: a file with public keys, or a folder of such files; then versions that none of them has signed raise
    ``Untrusted``. By default those that ``RAYSTOW_TRUSTED_KEYS`` names, else those that the repository itself asks for.
    ``NotARepository`` if there is none. For S3, endpoint, region and credentials come from the usual AWS configuration.
    """
    from .orchestrator.arguments import address
    from .storage.repository import open_repository

    return open_repository(address(uri), trusted_keys=trusted_keys)


def latest(uri: str | os.PathLike[str], *, trusted_keys: str | os.PathLike[str] | None = None) -> Version | None:
    """What ``open(uri).latest()`` gives, by a single read of the store, however many versions there are.

    Raises what ``open`` and ``latest`` raise.
    """
    from .orchestrator.arguments import address
    from .storage.repository import latest_version

    return latest_version(address(uri), trusted_keys=trusted_keys)


def restore_latest(
    uri: str | os.PathLike[str], into: dict[str, Any], *, strict: bool = True, cast: bool = False
) -> Version | None:
    """Fill ``into`` from the newest version at ``uri``, with or without a cluster; that version, or None if there is none.

    Tensors and arrays are filled in place, also DTensors, each rank with its own part; other values are replaced in the dicts
    and lists that hold them. ``StateError`` if names, shapes or dtypes do not match (``strict=False``: names may differ;
    ``cast=True``: dtypes may, and are converted). If the newest version is damaged, this says so in the log and takes the one
    before; but one of several ranks raises ``Damaged``: ``Checkpointer.restore_latest`` lets them fall back together.
    """
    from .orchestrator.agreement import Alone
    from .orchestrator.placement import placement
    from .orchestrator.restore import restore_latest as restore

    rank, world_size = placement()
    repository = open(uri)
    agreement = Alone(repository, fall_back=world_size == 1)
    return restore(repository, into, agreement, rank=rank, world_size=world_size, strict=strict, cast=cast)
