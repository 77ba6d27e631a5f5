"""Checkpoints for training on Ray. This module is the public interface.

``Checkpointer`` needs a Ray cluster. Reading (``open``, ``Repository``, ``Version``, ``restore``) needs neither Ray nor a GPU.
Modules are imported when one of their names is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from .integrations.run.run import Run
    from .orchestrator.client.checkpointer import Checkpointer
    from .orchestrator.client.failures import Failures
    from .orchestrator.client.options import Compression, Interval, Memory, Replication
    from .orchestrator.client.part import BegunSave, Part
    from .orchestrator.client.pending import Pending
    from .orchestrator.export.exports import export_model, export_version
    from .orchestrator.journal.journal import Journal
    from .orchestrator.sensitivity import Proposal, Sensitivity, Trial, sensitivity
    from .state.as_saved import AsSaved
    from .state.box import Box, Boxes
    from .state.lossy.rules import Blockwise, MantissaBits
    from .state.lossy.sqnr import Sqnr
    from .state.per_rank import PerRank
    from .state.rng import Rng
    from .state.tree import State
    from .storage.errors import (
        ClusterError,
        Damaged,
        DeadlineExceeded,
        Fenced,
        MissingDependency,
        NotARepository,
        NotFound,
        OutcomeUnknown,
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
    from .storage.retention.export_rule import Export
    from .storage.retention.plan import CompactionPlan, RetentionPlan
    from .storage.retention.policy import Policy
    from .storage.versions.version import TensorInfo, Version
    from .storage.versions.version_selector import VersionSelector

__all__ = [
    "AsSaved",
    "BegunSave",
    "Blockwise",
    "Box",
    "Boxes",
    "Checkpointer",
    "ClusterError",
    "CollectionPlan",
    "CompactionPlan",
    "Compression",
    "Damaged",
    "DeadlineExceeded",
    "Export",
    "Failures",
    "Fenced",
    "Interval",
    "Journal",
    "MantissaBits",
    "Memory",
    "MissingDependency",
    "NotARepository",
    "NotFound",
    "OutcomeUnknown",
    "Part",
    "Pending",
    "PerRank",
    "Policy",
    "PreconditionFailed",
    "Proposal",
    "RaystowError",
    "Replication",
    "Repository",
    "RetentionPlan",
    "Rng",
    "Run",
    "SaveFailed",
    "Sensitivity",
    "Sqnr",
    "StateError",
    "StoreError",
    "StoreUnavailable",
    "TensorInfo",
    "Trial",
    "UnsafeStore",
    "Unsupported",
    "Untrusted",
    "Version",
    "copy",
    "export_model",
    "export_version",
    "latest",
    "open",
    "restore",
    "restore_latest",
    "sensitivity",
]

_MODULES = {
    "AsSaved": "state.as_saved",
    "BegunSave": "orchestrator.client.part",
    "Blockwise": "state.lossy.rules",
    "Box": "state.box",
    "Boxes": "state.box",
    "Checkpointer": "orchestrator.client.checkpointer",
    "CollectionPlan": "storage.retention.collect",
    "CompactionPlan": "storage.retention.plan",
    "Compression": "orchestrator.client.options",
    "Part": "orchestrator.client.part",
    "Export": "storage.retention.export_rule",
    "Failures": "orchestrator.client.failures",
    "Journal": "orchestrator.journal.journal",
    "MantissaBits": "state.lossy.rules",
    "Interval": "orchestrator.client.options",
    "Memory": "orchestrator.client.options",
    "Pending": "orchestrator.client.pending",
    "PerRank": "state.per_rank",
    "Policy": "storage.retention.policy",
    "Proposal": "orchestrator.sensitivity",
    "Replication": "orchestrator.client.options",
    "Repository": "storage.repository",
    "RetentionPlan": "storage.retention.plan",
    "Rng": "state.rng",
    "Run": "integrations.run.run",
    "Sensitivity": "orchestrator.sensitivity",
    "Sqnr": "state.lossy.sqnr",
    "TensorInfo": "storage.versions.version",
    "Trial": "orchestrator.sensitivity",
    "Version": "storage.versions.version",
    "export_model": "orchestrator.export.exports",
    "export_version": "orchestrator.export.exports",
    "sensitivity": "orchestrator.sensitivity",
}

_SUBMODULES = ("dcp", "deepspeed", "huggingface", "lightning", "megatron", "ray_train", "torchtitan", "trackers", "verl")
"""Integrations: each needs the library that it integrates with."""


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in __all__:
        raise AttributeError(f"module 'raystow' has no attribute {name!r}")
    from .storage import extras
    from .storage.runtime.gc_pause import uncollected

    with uncollected(), extras.named():
        return getattr(importlib.import_module(f".{_MODULES.get(name, 'storage.errors')}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES, "__version__"])


def open(uri: str | os.PathLike[str], *, trusted_keys: str | os.PathLike[str] | None = None) -> Repository:
    """Open a repository for reading. Needs neither Ray nor torch nor a GPU.

    Args:
        uri: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``, ``file:///path`` or a path. Endpoint,
            region and credentials come from the usual configuration of AWS, Google or Azure.
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


def copy(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    versions: Iterable[VersionSelector] | None = None,
    *,
    sign: bool = False,
    memory: int = 256 << 20,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> list[Version]:
    """Copy versions to another store, which becomes a replica: versions keep their ids, bytes and signatures.

    Every digest is checked. A version is listed at the destination when all of it is there; an interrupted copy is continued by
    another call. See ``raystow cp --help``.

    Args:
        source: The repository to copy from; see ``open``.
        destination: The replica. It is created if nothing is there.
        versions: The versions to copy, with their bases; see ``restore``. None: all that are newer than the replica's.
        sign: Whether to sign the copies with the key that ``RAYSTOW_SIGNING_KEY`` names; else signatures are kept.
        memory: Bytes of packs in memory at a time. A larger pack is copied alone; packs have 64 MiB.
        progress: Called with the bytes of each pack that is at the destination, from several threads.

    Returns:
        The versions that were added to the replica, oldest first.

    Raises:
        StateError: ``destination`` is another repository or was saved to by a training, a version is rolled back or older than
            what the replica has seen, or there is no key to sign with.
        NotARepository: There is none at ``source``.
        NotFound: There is no such version.
        Damaged: Names the object of the source. Its version is not added, those before it are.
        StoreError: A store failed.
    """
    from .orchestrator.argument_checks import address
    from .storage.copies.copy import plan_copy

    return plan_copy(address(source), address(destination), versions, sign=sign, memory=memory).execute(progress)


def restore(
    source: str | os.PathLike[str] | Version,
    into: State,
    version: VersionSelector = "latest",
    *,
    strict: bool = True,
    allow_missing: str | Sequence[str] = (),
    allow_unused: str | Sequence[str] = (),
    cast: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Version | None:
    """Fill ``into`` from a version, with or without a Ray cluster.

    Rank and world size come from Ray Train, torch.distributed, or ``RANK`` and ``WORLD_SIZE``. Each of several ranks looks the
    version up by itself: pass an id, or use ``Checkpointer.restore``, with which all ranks agree.

    Args:
        source: A repository, see ``open``, or a ``Version``.
        into: A state like the one saved. Tensors and arrays are filled in place, of DTensors this rank's shards; other values are
            replaced in the dicts and lists that hold them, and containers of such values as a whole. Objects are loaded at the
            end. ``AsSaved`` stands for a part of another structure.
        version: Of a repository, an id, the name of a pin, ``"step:60"`` (the newest version of that step), or ``"latest"``: the
            newest one. If that is damaged and this process is alone, the newest whole one before it is restored, with an error
            in the log.
        strict: Whether names that only one side has are an error. False allows all of them, with a warning.
        allow_missing: Names of ``into`` that the version may lack; they are left unchanged, with a warning. A pattern such as
            ``"optim"`` (all names in this container) or ``"*.lora_?"``, or several.
        allow_unused: Names of the version that ``into`` may lack; patterns as for ``allow_missing``.
        cast: Whether to convert to the dtypes of ``into``; else another dtype is an error.
        progress: Called with the decoded bytes of each chunk, from several threads. None: a progress bar in a terminal or
            notebook, after two seconds.

    Returns:
        The version, or None if the latest one is asked for and the repository has none.

    Raises:
        StateError: Names, shapes or dtypes do not match or memory is shared: ``into`` is unchanged; or ``version`` is invalid.
            Or an object has raised as it was loaded: the error names it, and those that are loaded already.
        NotFound: There is no such version.
        Damaged: The version is damaged, or with ``"latest"`` no version is whole. The content of ``into`` is undefined.
        NotARepository: There is no repository at ``source``.
    """
    from .storage.runtime.gc_pause import uncollected

    with uncollected():  # imports and the set-up of a store allocate much
        from .orchestrator.standalone.restore import restore as restore_alone

        names = {"allow_missing": allow_missing, "allow_unused": allow_unused}
        return restore_alone(source, into, version, strict=strict, cast=cast, progress=progress, **names)


def restore_latest(
    uri: str | os.PathLike[str],
    into: State,
    *,
    strict: bool = True,
    allow_missing: str | Sequence[str] = (),
    allow_unused: str | Sequence[str] = (),
    cast: bool = False,
) -> Version | None:
    """Fill ``into`` from the latest version: ``restore`` without ``version``.

    Args:
        uri: See ``open``.
        into: See ``restore``.
        strict: See ``restore``.
        allow_missing: See ``restore``.
        allow_unused: See ``restore``.
        cast: See ``restore``.

    Returns:
        The version, or None if the repository has none.
    """
    return restore(uri, into, strict=strict, allow_missing=allow_missing, allow_unused=allow_unused, cast=cast)
