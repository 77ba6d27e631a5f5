"""Finds the rank and world size that Ray Train or torch.distributed gave this process."""

from __future__ import annotations

import sys


def placement() -> tuple[int, int]:
    """Rank and world size of this process, from Ray Train, else torch.distributed; (0, 1) if neither is in use."""
    train = sys.modules.get("ray.train")
    if train is not None:
        try:
            context = train.get_context()
            return int(context.get_world_rank()), int(context.get_world_size())
        except (RuntimeError, AttributeError):
            pass  # not in a Ray Train worker
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    return 0, 1
