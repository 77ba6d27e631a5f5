"""Retention after ``fit()``: drops the versions that Ray Train drops once its workers have ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Protocol

from .pointer import Checkpoint, identity, read, repository_of
from .train_sync import drop_unlisted


class Result(Protocol):
    """A ``ray.train.Result``: the run's folder ``path``, its last checkpoint, and the best ones that Train kept. This module
    imports no Ray."""

    path: str
    checkpoint: Checkpoint | None
    best_checkpoints: Sequence[tuple[Checkpoint, Mapping[str, object]]] | None


def prune(result: Result) -> None:
    """Drop the versions that Ray Train dropped after its workers ended, as validation may do.

    Without this call they are dropped when the run is resumed.

    Args:
        result: The result of ``trainer.fit()``, or of ``ray.train.Result.from_path``.

    Raises:
        NotFound: A pointer or version was dropped already.
        StateError: A checkpoint does not point to a version.
        StoreUnavailable: The store does not answer.
    """
    kept = [result.checkpoint, *(checkpoint for checkpoint, _ in result.best_checkpoints or ())]
    listed = {which: one for one in kept if one is not None and (which := identity(one.path)) is not None}
    if listed:
        newest = listed[max(listed)]
        drop_unlisted(repository_of(newest, read(newest)), PurePosixPath(result.path).name, listed)
