"""Puts a version back into a training state: tensors and arrays in place, other values where the state holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..storage import values
from ..storage.errors import StateError
from ..storage.reader import Request
from ..storage.repository import Repository
from ..storage.version import Version
from .shards import Shard, shard_of
from .state import Leaf, flatten, replace, show

Progress = Callable[[int], None]
_LISTED = 10  # names in an error; the rest is counted


def _silent(nbytes: int) -> None:
    pass


def restore(version: Version, into: Any, *, rank: int = 0, strict: bool = True, progress: Progress = _silent) -> None:
    """Fill ``into`` from ``version``, bit for bit; each rank reads the chunks that overlap its own shards.

    With ``strict``, names that only one side has are an error before anything is changed; without it they are left alone. A
    tensor whose shape or dtype differs from what was saved is always an error. If reading fails half-way (``Damaged``,
    ``StoreError``), the content of ``into`` is undefined. ``progress`` is told the decoded bytes of each chunk.
    """
    leaves = flatten(into, what="into")
    rows = {row.name: row for row in version.value_rows(rank)}
    _check_names({leaf.name for leaf in leaves}, set(version.chunks) | set(rows), version, strict)
    requests: list[Request] = []
    elsewhere: list[tuple[Shard, Request]] = []
    new: dict[tuple[Any, ...], Any] = {}
    for leaf in leaves:
        if leaf.name in rows and not (leaf.is_tensor and leaf.name in version.chunks):
            new[leaf.path] = values.loads(rows[leaf.name].text)
        elif leaf.name in version.chunks and (not leaf.is_tensor or isinstance(leaf.value, np.generic)):
            new[leaf.path] = version.read(leaf.name)
        elif leaf.name in version.chunks:
            shard = _matching(leaf, version)
            target = shard.bits if isinstance(shard.bits, np.ndarray) else np.empty(shard.extent, f"V{shard.itemsize}")
            request = Request(leaf.name, version.chunks[leaf.name], (shard.offset, shard.extent), target)
            if isinstance(shard.bits, np.ndarray):
                requests.append(request)
            else:
                elsewhere.append((shard, request))
    reader = version.reader()
    reader.fill(requests, progress)
    for shard, request in elsewhere:  # one at a time: its bytes pass through host memory
        reader.fill([request], progress)
        _to_device(request.target, shard)
    replace(into, new)


def restore_latest(
    repository: Repository,
    into: Any,
    *,
    rank: int = 0,
    strict: bool = True,
    progress: Progress = _silent,
) -> Version | None:
    """``restore`` from the newest version; that version, or None if there is none."""
    version = repository.latest()
    if version is not None:
        restore(version, into, rank=rank, strict=strict, progress=progress)
    return version


def _matching(leaf: Leaf, version: Version) -> Shard:
    shard, saved = shard_of(leaf, what="into"), version.chunks[leaf.name][0]
    if isinstance(shard.bits, np.ndarray) and isinstance(leaf.value, np.ndarray) and not leaf.value.flags.writeable:
        raise StateError("the array is read-only", subject=show(leaf.path, "into"))
    if (shard.dtype, shard.shape) != (saved.dtype, saved.shape):
        raise StateError(
            f"is {shard.dtype} {shard.shape}, but version {version.id} holds {saved.dtype} {saved.shape}",
            subject=show(leaf.path, "into"),
        )
    return shard


def _check_names(wanted: set[str], saved: set[str], version: Version, strict: bool) -> None:
    missing, unexpected = sorted(wanted - saved), sorted(saved - wanted)
    if not strict or not (missing or unexpected):
        return
    parts = [
        f"{title}: {', '.join(names[:_LISTED])}" + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
        for title, names in (("in `into` but not saved", missing), ("saved but not in `into`", unexpected))
        if names
    ]
    raise StateError("; ".join(parts), subject=f"version {version.id}", remedy="make them match, or pass strict=False")


def _to_device(target: np.ndarray[Any, Any], shard: Shard) -> None:
    import torch

    if target.size:
        words = torch.from_numpy(target.reshape(-1).view(np.uint8)).view(shard.bits.dtype)
        shard.bits.copy_(words.reshape(shard.bits.shape))
