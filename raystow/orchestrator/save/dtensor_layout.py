"""The box of a DTensor that this rank has, and the ranks that have the same box. Needs no communication."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...storage.coding.kernels import Words
from ...storage.errors import StateError
from ...storage.format.boxes import Box

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, DTensor, Placement

_STAGES = {"pp", "pipe", "pipeline", "stage"}
"""Mesh dimensions along which ranks have different tensors."""


@dataclass(frozen=True)
class DTensorShard:
    """``box``: this rank's part. ``holders``: the ranks that have the same part, ascending. ``first``: the lowest rank that has a
    part of the tensor."""

    box: Box
    holders: tuple[int, ...]
    first: int


def dtensor_shard(tensor: DTensor, where: str) -> DTensorShard:
    """This rank's part of a DTensor; ``StateError`` if it is not one box, or not the box that torch computes."""
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
    return DTensorShard((tuple(offset), tuple(extent)), *_holders(MeshKey(mesh), same))


class MeshKey:
    """A mesh as a cache key, by identity: equal meshes may be slices of different worlds."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __hash__(self) -> int:
        return id(self.mesh)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeshKey) and self.mesh is other.mesh


@functools.lru_cache(maxsize=64)  # a few meshes of up to ten thousands of ranks serve thousands of tensors
def _holders(key: MeshKey, same: tuple[int | None, ...]) -> tuple[tuple[int, ...], int]:
    """The ranks at these coordinates of the mesh, ascending (None: at any), and the lowest of all its ranks."""
    mesh, ranks = key.mesh, key.mesh.mesh.numpy()
    mine = ranks[tuple(slice(None) if at is None else at for at in same)]
    return tuple(sorted(_alike(mesh, mine))), min(_alike(mesh, ranks))


def _check_placements(tensor: DTensor, where: str) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    splits: dict[int, list[tuple[Placement, int]]] = {}
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
def _solid(size: int, splits: Sequence[tuple[Placement, int]]) -> bool:
    """Whether each rank gets one range of a dimension of ``size``. ``splits``: placements that split it, each with a number of
    ranks. With FSDP over tensor parallelism it does, although the placement is strided."""
    import torch

    parts = [torch.arange(size).view((1,) * splits[0][0].dim + (size,))]
    for placement, ranks in splits:
        parts = list(itertools.chain.from_iterable(placement._split_tensor(p, ranks, with_padding=False)[0] for p in parts))
    return all(int(p.flatten()[-1] - p.flatten()[0]) + 1 == p.numel() for p in parts if p.numel())


def _alike(mesh: DeviceMesh, ranks: Words) -> list[int]:
    """The ranks that have the same parts as ``ranks`` of the mesh, also outside the mesh if it is a slice of a larger one.

    FSDP over tensor parallelism places a norm on the mesh of each FSDP group, and each group has all of it. Equal names mean
    equal tensors, as for plain tensors; pipeline stages have different ones.
    """
    from torch.distributed.device_mesh import _mesh_resources

    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else _mesh_resources.get_root_mesh(mesh)
    world, names = root.mesh.numpy(), root.mesh_dim_names or ("",) * root.ndim
    if world.size == mesh.size():
        return [int(rank) for rank in ranks.flat]
    members = np.argwhere(np.isin(world, mesh.mesh.numpy()))
    siblings = tuple(dim for dim, name in enumerate(names) if name not in _STAGES and np.ptp(members[:, dim]) == 0)
    return [int(rank) for rank in world[np.broadcast_to(np.isin(world, ranks).any(siblings, keepdims=True), world.shape)]]
