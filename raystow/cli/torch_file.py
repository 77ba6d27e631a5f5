"""Writes a version as one file for ``torch.load``, as the recipe ``dcp_to_torch_save`` of torch does for its own checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from msgspec.structs import replace

from ..integrations.dcp.keys import assemble
from ..orchestrator.export.output_dir import new_file
from ..state.tree import Path as StatePath
from ..storage.format import manifest, values
from ..storage.versions.version import Version


def write_torch_file(path: Path, version: Version, progress: Callable[[int], None]) -> None:
    """Write the nested state with the plain values of rank 0; arrays become tensors. The state must fit into memory.

    Raises:
        StateError: ``path`` exists.
        Damaged: Stored bytes do not match their digests.
    """
    with new_file(path, version.raw) as sink:
        leaves: list[tuple[StatePath, object]] = []
        for name, rows in version.chunks.items():
            tensors = [replace(row, kind=manifest.TENSOR) for row in rows]  # torch.load refuses arrays by default
            leaves.append((manifest.parse_path(rows[0].path), version.assemble(name, tensors)))
            progress(sum(row.nbytes for row in rows))
        leaves += [(manifest.parse_path(row.path), values.loads(row.text)) for row in version.value_rows(rank=0)]
        torch.save(assemble(leaves), sink)  # noqa: TID251  # for other tools: raystow itself reads no pickle
