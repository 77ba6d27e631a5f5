"""Refuses DTensors that DCP would save or load at the wrong offsets."""

from __future__ import annotations

from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.tensor import DTensor

from ...save.dtensor_layout import dtensor_shard


def check_placed(planner: SavePlanner | LoadPlanner, key: str) -> None:
    """Raise ``StateError`` if this rank has more than one box of the DTensor at ``key``."""
    tensor = getattr(planner, "state_dict", {}).get(key)
    if isinstance(tensor, DTensor):
        dtensor_shard(tensor, f'state_dict["{key}"]')
