"""Refuses what ``Writer`` and ``Reader`` cannot store or load."""

from __future__ import annotations

from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.tensor import DTensor

from ...state.dtensor_layout import dtensor_shard
from ...state.tree import flatten, is_tensor
from ...state.wrapper_tensors import WrapperText, inner_tensors, unwrapped
from ...storage.errors import NotARepository, StateError
from ...storage.stores import open_store


def check_placed(planner: SavePlanner | LoadPlanner, key: str) -> None:
    """Raise ``StateError`` if this rank has more than one box of the DTensor at ``key``, which does not tell DCP where they are:
    DCP would use the wrong offsets."""
    tensor = getattr(planner, "state_dict", {}).get(key)
    if isinstance(tensor, DTensor) and not hasattr(tensor._local_tensor, "__create_chunk_list__"):
        dtensor_shard(tensor, f'state_dict["{key}"]')


def is_wrapper(planner: SavePlanner | LoadPlanner, key: str) -> bool:
    """Whether the tensor at ``key`` consists of others."""
    tensor = getattr(planner, "state_dict", {}).get(key)
    return is_tensor(tensor) and inner_tensors(unwrapped(tensor), f'state_dict["{key}"]') is not None


def is_elsewhere(planner: LoadPlanner, key: str) -> bool:
    """Whether other ranks have all elements of the DTensor at ``key``, where it may consist of other tensors."""
    tensor = getattr(planner, "state_dict", {}).get(key)
    return isinstance(tensor, DTensor) and 0 in tensor._local_tensor.shape and 0 not in tensor.shape


def refuse_wrappers(planner: LoadPlanner, key: str) -> None:
    """Raise ``StateError`` if DCP would replace a tensor that consists of others by a dict."""
    value = getattr(planner, "state_dict", {}).get(key)
    described = isinstance(value, dict | list | tuple) and any(
        isinstance(leaf.value, WrapperText) for leaf in flatten({key: value})
    )
    if described:
        what = "contains a tensor that consists of others, and DCP does not fill it in place"
        raise StateError(
            what, subject=f'state_dict["{key}"]', remedy="pass a tensor like the one that was saved, in dicts and lists"
        )


def refuse_torch_files(uri: str) -> None:
    """Raise ``NotARepository`` if torch's ``FileSystemWriter`` has saved to this address."""
    store = open_store(uri)
    if any(info.key.endswith(".distcp") for info in store.list("__")):
        remedy = "dcp.load it with FileSystemReader; save to another address with raystow.dcp.Writer"
        raise NotARepository("these are files of torch's FileSystemWriter, not a repository", subject=store.uri, remedy=remedy)
