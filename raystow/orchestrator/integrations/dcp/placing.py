"""DTensors that DCP would save or load in the wrong place are refused."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from ...placed import placed


def check_placed(planner: Any, key: str) -> None:
    """``StateError`` naming the key of a DTensor of which this rank holds more than one box."""
    tensor = getattr(planner, "state_dict", {}).get(key)
    if isinstance(tensor, DTensor):
        placed(tensor, f'state_dict["{key}"]')
