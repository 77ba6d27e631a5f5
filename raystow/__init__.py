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
    from .orchestrator.pending import Pending
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
    )
    from .storage.repository import Repository
    from .storage.retention import Policy
    from .storage.retention_plan import RetentionPlan
    from .storage.version import TensorInfo, Version

__all__ = [
    "Checkpointer",
    "ClusterError",
    "Damaged",
    "DeadlineExceeded",
    "Fenced",
    "NotARepository",
    "NotFound",
    "Pending",
    "Policy",
    "PreconditionFailed",
    "RaystowError",
    "Repository",
    "RetentionPlan",
    "SaveFailed",
    "StateError",
    "StoreError",
    "StoreUnavailable",
    "TensorInfo",
    "UnsafeStore",
    "Unsupported",
    "Version",
    "open",
    "restore_latest",
]

_HOMES = {
    "Checkpointer": "orchestrator.client",
    "Pending": "orchestrator.pending",
    "Policy": "storage.retention",
    "Repository": "storage.repository",
    "RetentionPlan": "storage.retention_plan",
    "TensorInfo": "storage.version",
    "Version": "storage.version",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'raystow' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES.get(name, 'storage.errors')}", __name__), name)


def open(uri: str | os.PathLike[str]) -> Repository:
    """Open the repository at ``uri`` (``s3://bucket/prefix``, ``file:///path`` or a path) for reading.

    ``NotARepository`` if there is none. For S3, endpoint, region and credentials come from the usual AWS configuration.
    """
    from .storage.repository import open_repository

    return open_repository(str(uri))


def restore_latest(uri: str | os.PathLike[str], into: dict[str, Any], *, strict: bool = True) -> Version | None:
    """Fill ``into`` from the newest version at ``uri``, with or without a cluster; that version, or None if there is none.

    Tensors and arrays are filled in place, also DTensors, each rank with its own part; other values are replaced in the dicts
    and lists that hold them. ``StateError`` if names, shapes or dtypes do not match (``strict=False``: names may differ).
    """
    from .orchestrator.placement import placement
    from .orchestrator.restore import restore_latest as restore

    return restore(open(uri), into, rank=placement()[0], strict=strict)
