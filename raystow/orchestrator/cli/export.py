"""Writes a version as files: safetensors, an index for those that were split, and the plain values as JSON.

Memory stays within one slab and what the reader needs, whatever the tensors' size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...storage.coding import dtypes
from ...storage.format import values
from ...storage.format.boxes import Box
from ...storage.reader import Request
from ...storage.version import Version
from ..cutting import cuts
from ..shards import Shard
from ..state import Leaf
from .new_folder import durable_file
from .safetensors_file import File, Placed

SLAB = 128 << 20
"""Bytes that are decoded into memory before they are written."""


def write_file(path: Path, file: File, version: Version, progress: Callable[[int], None]) -> None:
    """Write one safetensors file, slab by slab."""
    reader, buffer = version.reader(), np.empty(min(SLAB, file.nbytes), np.uint8)
    about = {"raystow.version": str(version.id), "raystow.step": str(version.step)}
    with durable_file(path) as sink:
        sink.write(file.header(about))
        for slab in _slabs(file.tensors):
            requests, end = [], 0
            for placed, box, nbytes in slab:
                itemsize = dtypes.dtype(placed.info.dtype).itemsize
                target = buffer[end : end + nbytes].view(f"V{itemsize}").reshape(box[1])
                requests.append(Request(placed.name, version.chunks[placed.name], box, target))
                end += nbytes
            reader.fill(requests, progress)
            sink.write(buffer[:end].data)


def _slabs(tensors: Iterable[Placed]) -> Iterator[list[tuple[Placed, Box, int]]]:
    """The tensors' bytes in the order of the file, in lists of boxes that fit a slab together."""
    slab: list[tuple[Placed, Box, int]] = []
    used = 0
    for placed in tensors:
        info = placed.info
        leaf = Leaf((), placed.name, None, True)
        whole = Shard(leaf, info.kind, info.dtype, info.shape, (0,) * len(info.shape), info.shape, (), 0, None)
        for box, _, _ in cuts(whole, SLAB // 2):
            nbytes = math.prod(box[1]) * whole.itemsize
            if used + nbytes > SLAB:
                yield slab
                slab, used = [], 0
            slab.append((placed, box, nbytes))
            used += nbytes
    yield slab


def write_index(folder: Path, parts: list[File]) -> None:
    """``<group>.safetensors.index.json`` for a group that takes several files, as Hugging Face's tools write and read it."""
    index = {
        "metadata": {"total_size": sum(file.nbytes for file in parts)},
        "weight_map": {placed.name: file.name for file in parts for placed in file.tensors},
    }
    write_json(folder / f"{parts[0].group}.safetensors.index.json", index)


def plain_values(version: Version) -> dict[str, Any]:
    """The content of ``values.json``: ``values`` as rank 0 saved them, ``by_rank`` those of which ranks saved different ones."""
    variants: dict[str, dict[str, set[int]]] = {}
    for fragment in version.fragments:
        for row in fragment.values:
            variants.setdefault(row.name, {}).setdefault(row.text, set()).update(row.ranks)
    return {
        "version": version.id,
        "step": version.step,
        "created": version.created,
        "metrics": {name: values.encode(value) for name, value in version.metrics.items()},
        "values": {name: values.encode(value) for name, value in version.values().items()},
        "by_rank": {
            name: [{"ranks": sorted(ranks), "value": json.loads(text)} for text, ranks in found.items()]
            for name, found in variants.items()
            if len(found) > 1
        },
    }


def write_json(path: Path, content: object) -> None:
    """Write a JSON file."""
    with durable_file(path) as sink:
        sink.write(json.dumps(content, indent=1, allow_nan=False).encode())
