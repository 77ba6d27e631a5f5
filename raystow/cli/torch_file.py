"""Writes a version as one file for ``torch.load``, as the recipe ``dcp_to_torch_save`` of torch does for its own checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from msgspec.structs import replace

from ..integrations.dcp.keys import assemble
from ..orchestrator.export.output_dir import new_file
from ..orchestrator.export.slabs import boxes_of
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
        for whole in boxes_of([version], version.tensors(), math.inf):
            tensors = [replace(row, kind=manifest.TENSOR) for row in whole.rows[0]]  # torch.load refuses arrays by default
            leaves.append((manifest.parse_path(tensors[0].path), version.assemble(whole.name, tensors)))
            progress(whole.nbytes)
        leaves += [(manifest.parse_path(row.path), values.loads(row.text)) for row in version.value_rows(rank=0)]
        torch.save(assemble(leaves), sink)  # noqa: TID251  # for other tools: raystow itself reads no pickle
