"""DTensors as messages, and back: a DTensor is its local elements, its mesh and its placements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from ....storage.errors import Damaged, StateError
from ....workers.protocol.messages import StagedLayout, StagedMesh, StagedPlacement
from ...save.state_tree import Leaf, show


def mesh_part(mesh: DeviceMesh) -> StagedMesh:
    """Describe a mesh."""
    names = mesh.mesh_dim_names
    return StagedMesh(mesh.device_type, tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()), names and tuple(names))


def layout_part(leaf: Leaf, mesh: int) -> StagedLayout:
    """Describe a DTensor on mesh number ``mesh``. ``StateError`` if it is a partial sum."""
    tensor: DTensor = leaf.value
    placements = tuple(_placement_part(placement, leaf) for placement in tensor.placements)
    return StagedLayout(mesh, tuple(tensor.shape), tuple(tensor.stride()), placements)


def meshes_of(parts: Iterable[StagedMesh], own: Iterable[object]) -> list[DeviceMesh]:
    """Return the meshes: those of the DTensors in ``own`` where they are the same, otherwise new ones without process groups."""
    known = {mesh_part(value.device_mesh): value.device_mesh for value in own if isinstance(value, DTensor)}
    return [known.get(part) or _mesh(part) for part in parts]


def assemble(local: torch.Tensor, layout: StagedLayout, meshes: Sequence[DeviceMesh]) -> DTensor:
    """Return the DTensor with these local elements."""
    if not 0 <= layout.mesh < len(meshes):
        raise Damaged(f"there is no mesh number {layout.mesh}", subject="the staged state")
    placements = tuple(map(_placement, layout.placements))
    meta = TensorMeta(torch.Size(layout.shape), layout.stride, local.dtype)
    return DTensor(local, DTensorSpec(meshes[layout.mesh], placements, tensor_meta=meta), requires_grad=False)


def _mesh(part: StagedMesh) -> DeviceMesh:
    ranks = torch.tensor(part.ranks, dtype=torch.int).reshape(part.shape)
    return DeviceMesh(part.device_type, ranks, mesh_dim_names=part.names, _init_backend=False)


def _placement_part(placement: Placement, leaf: Leaf) -> StagedPlacement:
    if placement.is_replicate():
        return StagedPlacement("replicate")
    if type(placement) is Shard:
        return StagedPlacement("shard", placement.dim)
    if type(placement) is _StridedShard:
        return StagedPlacement("strided", placement.dim, placement.split_factor)
    what = f"DTensors placed as {placement} cannot be sent"
    raise StateError(what, subject=show(leaf.path), remedy="redistribute it to Shard or Replicate")


def _placement(part: StagedPlacement) -> Placement:
    if part.kind == "replicate":
        return Replicate()
    return Shard(part.dim) if part.kind == "shard" else _StridedShard(part.dim, split_factor=part.split)
