"""Where this rank's part of a DTensor lies in the tensor, and which ranks hold the same part. Nothing is asked of other ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..storage.errors import StateError
from ..storage.format.boxes import Box

_STAGES = {"pp", "pipe", "pipeline", "stage"}
"""Mesh dimensions along which ranks hold different tensors."""


@dataclass(frozen=True)
class Placed:
    """``box``: this rank's part. ``holders``: the ranks that hold the same, ascending. ``first``: the lowest rank that holds a
    part of the tensor."""

    box: Box
    holders: tuple[int, ...]
    first: int


def placed(tensor: Any, where: str) -> Placed:
    """The place of this rank's part of a DTensor; ``StateError`` if it is not one box, or not the one that torch places there."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    here = mesh.get_coordinate()
    if here is None:
        raise StateError("this rank is not part of the tensor's mesh", subject=where)
    _check_placements(tensor, where)
    extent, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    held = tuple(tensor.to_local().shape)
    if held != tuple(extent):
        what = f"this rank holds {held} of {tuple(tensor.shape)}, where {tuple(placements)} places {tuple(extent)}"
        raise StateError(what, subject=where, remedy="split it as torch.chunk does")
    same = tuple(None if p.is_replicate() else at for p, at in zip(placements, here, strict=True))
    return Placed((tuple(offset), tuple(extent)), *_holders(Mesh(mesh), same))


class Mesh:
    """A mesh as a key of a cache: by identity, since equal ones may have been cut from different worlds."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def __hash__(self) -> int:
        return id(self.mesh)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self.mesh is other.mesh


@functools.lru_cache(maxsize=64)  # thousands of tensors lie on a few meshes, and a mesh may have ten thousands of ranks
def _holders(key: Mesh, same: tuple[int | None, ...]) -> tuple[tuple[int, ...], int]:
    """The ranks at these coordinates of the mesh, ascending (None: at any), and the lowest of all its ranks."""
    mesh, ranks = key.mesh, key.mesh.mesh.numpy()
    mine = ranks[tuple(slice(None) if at is None else at for at in same)]
    return tuple(sorted(_alike(mesh, mine))), min(_alike(mesh, ranks))


def _check_placements(tensor: Any, where: str) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    splits: dict[int, list[tuple[Any, int]]] = {}
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if type(placement) not in (Shard, Replicate, _StridedShard):
            what = f"DTensors placed as {placement} cannot be stored"
            raise StateError(what, subject=where, remedy="redistribute it to Shard or Replicate")
        if not placement.is_replicate():
            splits.setdefault(placement.dim, []).append((placement, size))
    for dim, of in splits.items():
        if any(type(placement) is _StridedShard for placement, _ in of) and not _solid(tensor.shape[dim], tuple(of)):
            what = f"DTensors placed as {tuple(tensor.placements)} cannot be stored: ranks hold more than one box of it"
            raise StateError(what, subject=where, remedy="redistribute it to Shard or Replicate")


@functools.lru_cache(maxsize=1024)
def _solid(size: int, splits: Sequence[tuple[Any, int]]) -> bool:
    """Whether a dimension of ``size``, split by these placements over so many ranks each, leaves every rank one range of it.
    FSDP over tensor parallelism does, though its placement is strided."""
    import torch

    parts = [torch.arange(size).view((1,) * splits[0][0].dim + (size,))]
    for placement, ranks in splits:
        parts = list(itertools.chain.from_iterable(placement._split_tensor(p, ranks, with_padding=False)[0] for p in parts))
    return all(int(p.flatten()[-1] - p.flatten()[0]) + 1 == p.numel() for p in parts if p.numel())


def _alike(mesh: Any, ranks: Any) -> list[int]:
    """The ranks that hold what ``ranks`` of the mesh do: also those beside the mesh, if it was cut from a larger one.

    FSDP over tensor parallelism leaves a norm on the mesh of its FSDP group alone, and each group holds all of it. That it is the
    same everywhere is taken from its name, as for plain tensors; pipeline stages hold different ones.
    """
    from torch.distributed.device_mesh import _mesh_resources

    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else _mesh_resources.get_root_mesh(mesh)
    world, names = root.mesh.numpy(), root.mesh_dim_names or ("",) * root.ndim
    if world.size == mesh.size():
        return [int(rank) for rank in ranks.flat]
    members = np.argwhere(np.isin(world, mesh.mesh.numpy()))
    beside = tuple(dim for dim, name in enumerate(names) if name not in _STAGES and np.ptp(members[:, dim]) == 0)
    return [int(rank) for rank in world[np.broadcast_to(np.isin(world, ranks).any(beside, keepdims=True), world.shape)]]
