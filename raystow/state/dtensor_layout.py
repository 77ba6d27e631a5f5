"""The boxes of a DTensor that this rank has, and the ranks that have the same boxes. Needs no communication."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import numpy as np

from ..storage.coding.kernels import Words
from ..storage.errors import StateError
from ..storage.format import boxes
from .box import Box

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, DTensor, Placement

_STAGES = {"pp", "pipe", "pipeline", "stage"}
"""Mesh dimensions along which ranks have different tensors."""

_Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges of one dimension: the first index and the number of indices of each."""


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(value, distributed.DTensor)


def dtensor_shard(tensor: DTensor, where: str) -> tuple[boxes.Box, tuple[int, ...]]:
    """This rank's part of a DTensor, and the ranks that have the same part, ascending. ``StateError`` if it is not one box, or
    not the box that torch computes."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if (several := dtensor_boxes(tensor, where)) is not None:
        if len(several) != 1:
            what = f"DTensors placed as {tuple(tensor.placements)} cannot be stored here: ranks hold more than one box of it"
            raise StateError(what, subject=where, remedy="redistribute it to Shard or Replicate")
        return several[0].box, several[0].ranks
    holders = _holders_of(tensor, where)
    extent, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    _check_held(tensor, tuple(extent), where)
    return (tuple(offset), tuple(extent)), holders


def dtensor_boxes(tensor: DTensor, where: str) -> tuple[Box, ...] | None:
    """This rank's boxes of a DTensor of which it may have several, or which says itself where they are; None for any other.

    ``torch.distributed.checkpoint`` asks for the places of uneven parts by ``__create_chunk_list__`` of the local tensor, which
    Megatron-FSDP and TorchRec define.
    """
    if hasattr(tensor._local_tensor, "__create_chunk_list__"):
        return tuple(_listed(tensor, where))
    if any(type(placement).__name__ == "_StridedShard" for placement in tensor.placements):
        holders, runs = _holders_of(tensor, where), _runs_of(tensor)
        if any(len(of) > 1 for of in runs):
            _check_held(tensor, tuple(sum(size for _, size in of) for of in runs), where)
            return tuple(_combinations(tensor, runs, holders))
    return None


def _listed(tensor: DTensor, where: str) -> list[Box]:
    """The boxes that the local tensor names."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    local = tensor._local_tensor
    shape, holders, found = tuple(tensor.shape), _holders_of(tensor, where), list[Box]()
    for number, chunk in enumerate(local.__create_chunk_list__()):
        part = local
        if hasattr(local, "__get_tensor_shard__"):
            part = local.__get_tensor_shard__(MetadataIndex(where, chunk.offsets, number))
        if tuple(part.shape) != tuple(chunk.sizes):
            what = f"this rank holds {tuple(part.shape)} where __create_chunk_list__ names {tuple(chunk.sizes)}"
            raise StateError(what, subject=where, remedy="update the list, or pass a raystow.Box")
        try:
            found.append(Box(part, shape, tuple(chunk.offsets), holders))
        except StateError as error:
            raise StateError(error.what, subject=where, remedy="update __create_chunk_list__, or pass a raystow.Box") from error
    return found


def _combinations(tensor: DTensor, runs: Sequence[_Runs], holders: tuple[int, ...]) -> list[Box]:
    """The boxes of all combinations of the dimensions' ranges."""
    found, local = list[Box](), tensor._local_tensor
    starts = [itertools.accumulate((size for _, size in of), initial=0) for of in runs]
    ranges = [[(*run, start) for run, start in zip(of, at, strict=False)] for of, at in zip(runs, starts, strict=True)]
    for chosen in itertools.product(*ranges):
        part = local[tuple(slice(start, start + size) for _, size, start in chosen)]
        found.append(Box(part, tuple(tensor.shape), tuple(first for first, _, _ in chosen), holders))
    return found


def _check_held(tensor: DTensor, placed: tuple[int, ...], where: str) -> None:
    held = tuple(tensor._local_tensor.shape)
    if held != placed:
        what = f"this rank holds {held} of {tuple(tensor.shape)}, where {tuple(tensor.placements)} places {placed}"
        raise StateError(what, subject=where, remedy="pass its local tensor as a raystow.Box, with the place where it begins")


def _holders_of(tensor: DTensor, where: str) -> tuple[int, ...]:
    """The ranks that have the same part of a DTensor."""
    mesh = tensor.device_mesh
    here = mesh.get_coordinate()
    if here is None:
        raise StateError("this rank is not part of the tensor's mesh", subject=where)
    _check_placements(tensor, where)
    return _holders(MeshKey(mesh), tuple(None if p.is_replicate() else at for p, at in zip(tensor.placements, here, strict=True)))


class MeshKey:
    """A mesh as a cache key, by identity: equal meshes may be slices of different worlds."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __hash__(self) -> int:
        return id(self.mesh)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeshKey) and self.mesh is other.mesh


@functools.lru_cache(maxsize=64)  # a few meshes of up to ten thousands of ranks serve thousands of tensors
def _holders(key: MeshKey, same: tuple[int | None, ...]) -> tuple[int, ...]:
    """The ranks at these coordinates of the mesh, ascending (None: at any)."""
    mine = key.mesh.mesh.numpy()[tuple(slice(None) if at is None else at for at in same)]
    return tuple(sorted(_alike(key.mesh, mine)))


def _check_placements(tensor: DTensor, where: str) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    for placement in tensor.placements:
        if type(placement) not in (Shard, Replicate, _StridedShard):
            what = f"DTensors placed as {placement} cannot be stored"
            raise StateError(what, subject=where, remedy="redistribute it to Shard or Replicate")


def _runs_of(tensor: DTensor) -> list[_Runs]:
    """This rank's ranges of each dimension: with FSDP over tensor parallelism one each, although the placement is strided."""
    here = tensor.device_mesh.get_coordinate()
    splits: dict[int, list[tuple[Placement, int]]] = {dim: [] for dim in range(tensor.ndim)}
    places = dict.fromkeys(splits, 0)
    for placement, ranks, at in zip(tensor.placements, tensor.device_mesh.shape, here, strict=True):
        if not placement.is_replicate():
            splits[placement.dim].append((placement, ranks))
            places[placement.dim] = places[placement.dim] * ranks + at
    return [_runs(size, tuple(splits[dim]))[places[dim]] for dim, size in enumerate(tensor.shape)]


@functools.lru_cache(maxsize=1024)
def _runs(size: int, splits: Sequence[tuple[Placement, int]]) -> list[_Runs]:
    """The ranges of a dimension of ``size`` that each rank gets. ``splits``: placements that split it, each with a number of
    ranks."""
    import torch

    if not splits:
        return [((0, size),)]
    parts = [torch.arange(size).view((1,) * splits[0][0].dim + (size,))]
    for placement, ranks in splits:
        parts = list(itertools.chain.from_iterable(placement._split_tensor(p, ranks, with_padding=False)[0] for p in parts))
    found = list[_Runs]()
    for part in parts:
        indices = part.flatten().numpy()
        runs = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
        found.append(tuple((int(run[0]), len(run)) if len(run) else (0, 0) for run in runs))
    return found


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
