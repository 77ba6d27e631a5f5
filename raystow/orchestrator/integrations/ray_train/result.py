"""For whoever called ``fit()``: what Ray Train drops after its workers have ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, Protocol

from ....storage.repository import open_repository
from .ledger import drop_unlisted
from .pointer import Checkpoint, identity, read


class Result(Protocol):
    """A ``ray.train.Result``: what Train has kept of the run in the folder ``path``, and what it was told last."""

    path: str
    checkpoint: Checkpoint | None
    best_checkpoints: Sequence[tuple[Checkpoint, dict[str, Any]]] | None


def prune(result: Result) -> None:
    """Drop the versions that Ray Train has dropped after the workers ended: validation may go on then, and decide what is kept.

    ``result``: of ``trainer.fit()``, or of ``ray.train.Result.from_path``. Without this call they go when the run is resumed.
    Raises what ``version_of`` raises, and ``StoreUnavailable``.
    """
    kept = [result.checkpoint, *(checkpoint for checkpoint, _ in result.best_checkpoints or ())]
    listed = {which: one for one in kept if one is not None and (which := identity(one.path)) is not None}
    if listed:
        drop_unlisted(open_repository(read(listed[max(listed)]).uri), PurePosixPath(result.path).name, listed)
