"""Refuses what ``Writer`` and ``Reader`` cannot store or load."""

from __future__ import annotations

from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.tensor import DTensor

from ....storage.errors import NotARepository
from ....storage.stores import open_store
from ...save.dtensor_layout import dtensor_shard


def check_placed(planner: SavePlanner | LoadPlanner, key: str) -> None:
    """Raise ``StateError`` if this rank has more than one box of the DTensor at ``key``: DCP would use the wrong offsets."""
    tensor = getattr(planner, "state_dict", {}).get(key)
    if isinstance(tensor, DTensor):
        dtensor_shard(tensor, f'state_dict["{key}"]')


def refuse_torch_files(uri: str) -> None:
    """Raise ``NotARepository`` if torch's ``FileSystemWriter`` has saved to this address."""
    store = open_store(uri)
    if any(info.key.endswith(".distcp") for info in store.list("__")):
        remedy = "dcp.load it with FileSystemReader; save to another address with raystow.dcp.Writer"
        raise NotARepository("these are files of torch's FileSystemWriter, not a repository", subject=store.uri, remedy=remedy)
