"""DTensors in a process group: each box is stored once, replicas share the work, and every rank restores its part.

``make soak`` runs this test; ``make test`` runs a selection of the same layouts in ``test_resharding.py``.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import raystow
from integration.ranks import Rank, every, start

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.slow]
SHAPE = (1030, 515)  # does not divide evenly


def whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "rows": torch.randn(SHAPE, generator=generator),
        "columns": torch.randn(SHAPE, generator=generator),
        "everywhere": torch.randn(SHAPE, generator=generator),
        "grid": torch.randn(SHAPE, generator=generator),
        "narrow": torch.randn(1, 7, generator=generator),  # smaller than the mesh
    }


def join_group(self: Rank, port: int) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=self.checkpointer.rank, world_size=self.checkpointer.world_size)


def place(self: Rank, shape: tuple[int, ...], names: tuple[str, ...], filled: bool) -> None:
    """Set the state to DTensors on a mesh of ranks: hybrid sharding if the mesh has two dimensions."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    outer: list[Any] = [Replicate()] * (len(shape) - 1)
    placements = {
        "rows": [*outer, Shard(0)],
        "columns": [*outer, Shard(1)],
        "everywhere": [*outer, Replicate()],
        "grid": [Shard(0), Shard(1)] if outer else [Shard(0)],
        "narrow": [*outer, Shard(0)],
    }
    tensors = whole()
    if not filled:
        tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    self.state = {name: distribute_tensor(tensor, mesh, placements[name]) for name, tensor in tensors.items()}


def gathered(self: Rank) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor() for name, tensor in self.state.items()}


def test_hybrid_shards_are_saved_and_restored(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 4)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    every(ranks, "do", join_group, port)
    every(ranks, "do", place, (2, 2), ("replicate", "shard"), True)
    every(ranks, "save", 1)
    every(ranks, "result")
    version = raystow.open(tmp_path).latest()
    assert version is not None
    tensors = whole()
    assert version.raw == sum(tensor.nbytes for tensor in tensors.values())  # each box is stored once
    for name, tensor in tensors.items():
        assert torch.equal(version.read(name), tensor), name
    loads = [sum(chunk.nbytes for chunk in fragment.chunks) for fragment in version.fragments]
    assert max(loads) - min(loads) <= 4 << 20  # a chunk
    for shape, names in (((2, 2), ("replicate", "shard")), ((4,), ("shard",))):  # onto the same mesh, and onto another
        every(ranks, "do", place, shape, names, False)
        every(ranks, "restore")
        for got in every(ranks, "do", gathered):
            assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
    raystow.open(tmp_path).verify(version)

    def refused(self: Rank) -> str:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial

        partial = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (4,)), [Partial()])
        with pytest.raises(raystow.StateError) as error:
            self.checkpointer.save({"a": {"b": partial}}, step=2)
        return str(error.value)

    assert all(text.startswith('state["a"]["b"]: DTensors placed as') for text in every(ranks, "do", refused))
    ray.get([rank.do.remote(lambda self: __import__("torch").distributed.destroy_process_group()) for rank in ranks])
