"""Puts a version back into a training state: tensors and arrays in place, other values where the state holds them."""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from ..storage import dtypes, values
from ..storage.errors import StateError, Unsupported
from ..storage.reader import Reader, Request
from ..storage.repository import Repository
from ..storage.version import Version
from .shards import Shard, shard_of
from .state import Leaf, flatten, replace, show

logger = logging.getLogger(__name__)

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
    in_memory: list[Request] = []
    on_gpu: dict[int, list[Request]] = defaultdict(list)
    new: dict[tuple[Any, ...], Any] = {}
    for leaf in leaves:
        if leaf.name in rows and not (leaf.is_tensor and leaf.name in version.chunks):
            new[leaf.path] = values.loads(rows[leaf.name].text)
        elif leaf.name in version.chunks and (not leaf.is_tensor or isinstance(leaf.value, np.generic)):
            new[leaf.path] = version.read(leaf.name)
        elif leaf.name in version.chunks:
            shard = _matching(leaf, version)
            request = Request(leaf.name, version.chunks[leaf.name], (shard.offset, shard.extent), shard.bits)
            (in_memory if shard.device is None else on_gpu[shard.device]).append(request)
    reader = version.reader()
    reader.fill(in_memory, progress)
    for device, requests in on_gpu.items():
        _fill_on_gpu(reader, device, requests, progress)
    replace(into, new)


def _fill_on_gpu(reader: Reader, device: int, requests: list[Request], progress: Progress) -> None:
    """Fill tensors of a GPU by decoding there, or without nvCOMP tensor by tensor through host memory."""
    import torch

    try:
        from ..workers.cuda.decoder import Decoder
        from ..workers.cuda.nvcomp import version

        version()
    except (ImportError, Unsupported) as error:
        logger.warning("decoding on the CPU, at a tenth of the speed: %s", error)
        for request in requests:
            words = request.target
            raw = np.empty(request.box[1], f"V{dtypes.dtype(request.chunks[0].dtype).itemsize}")
            reader.fill([dataclasses.replace(request, target=raw)], progress)
            if raw.size:
                words.copy_(torch.from_numpy(raw.reshape(-1).view(np.uint8)).view(words.dtype).reshape(words.shape))
        return
    decoder = Decoder(torch.device("cuda", device))
    try:
        decoder.fill(reader, requests, progress)
    finally:
        decoder.close()


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
