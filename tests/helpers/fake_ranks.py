"""DTensors of several ranks in one process: each is made as its rank would make it, without communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

_Made = TypeVar("_Made")


def as_ranks(world: int, make: Callable[[int, DeviceMesh], _Made], shape: tuple[int, ...] = ()) -> list[_Made]:
    """Return what ``make(rank, mesh)`` returns on each rank of a mesh of ``shape``, by default of one dimension."""
    made = []
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            made.append(make(rank, init_device_mesh("cpu", shape or (world,))))
        finally:
            dist.destroy_process_group()
    return made
