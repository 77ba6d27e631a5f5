"""A state of Megatron as a state of raystow: tensors in boxes under Megatron's own keys, objects as texts.

<key of a ShardedTensor>                    boxes of the whole tensor
optimizer.state.<name>.<key of a weight>    boxes of the optimizer's state, in the shape of the weight
<unique key of a ShardedObject>             its text, as bytes
common_state                                all else, as Megatron keeps it: that of rank 0
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    apply_factory_merges,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from torch import distributed

from ...state.as_saved import AsSaved
from ...state.box import Box, Boxes
from ...state.tree import State
from ...storage.coding.digest import stored_digest
from ...storage.errors import StateError
from ...storage.format.groups import WEIGHTS, group
from . import plain_objects
from .flat_range import FlatRange
from .optimizer_groups import regrouped
from .replicas import ReplicaPart, Replicas

COMMON = "common_state"
"""The name of the common state, also in Megatron's own checkpoints."""
CONTENT = "content_metadata"
"""The key in the common state of what was saved in which form."""


@dataclass(frozen=True)
class TensorPart:
    """A box of a stored tensor that this rank has. ``replica``: whether other ranks may have the same box."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: torch.Tensor
    main: bool
    replica: bool
    resizable: bool

    @property
    def part(self) -> ReplicaPart:
        return ReplicaPart(self.name, f"{self.local.dtype} {self.shape}", f"{self.offset} {tuple(self.local.shape)}", self.main)

    def box(self, ranks: tuple[int, ...] = ()) -> Box:
        return Box(self.local, self.shape, self.offset, ranks)

    def within(self, shape: tuple[int, ...]) -> TensorPart | None:
        """What lies in a tensor that was saved in another shape; None if nothing does."""
        extent = [min(size, end - low) for size, low, end in zip(self.local.shape, self.offset, shape, strict=True)]
        if min(extent, default=1) <= 0:
            return None
        local = self.local[tuple(slice(size) for size in extent)]
        return TensorPart(self.name, shape, self.offset, local, self.main, self.replica, self.resizable)


def saved_tree(state: ShardedStateDict, replicas: Replicas) -> State:
    """The tree to save. Every rank calls this; ``StateError`` on all ranks if the state of one cannot be stored."""
    parts, objects, common = list[TensorPart](), dict[str, torch.Tensor](), b""
    failure: Exception | None = None
    try:
        sharded, rest = save_preprocess(_copied(state), validate_access_integrity=False)
        for leaf in nested_values(sharded):
            if isinstance(leaf, ShardedObject):
                if is_main_replica(leaf.replica_id):
                    objects[leaf.unique_key] = plain_objects.encode(leaf.data, leaf.unique_key)
            else:
                parts += _parts(_copied_buffer(leaf))
        common = stored_digest(plain_objects.encode(list(_tensors(rest)), COMMON).numpy())
        if distributed.get_rank() == 0:
            objects[COMMON] = plain_objects.encode(rest, COMMON)
    except Exception as error:  # the other ranks wait for this one
        failure = error
    alone = [ReplicaPart(name, "", "", main=True) for name in objects]
    shared = [part for part in parts if part.replica]
    holders = replicas.holders([*(part.part for part in shared), *alone], common, failure)
    ranks = dict(zip(map(id, shared), holders, strict=False))
    found = defaultdict[str, list[Box]](list)
    for part in parts:
        if not part.replica:
            found[part.name] += [part.box()] if part.main else []
        elif ranks[id(part)]:
            found[part.name].append(part.box(ranks[id(part)]))
    tree: State = {name: Boxes(tuple(boxes)) for name, boxes in found.items() if boxes}
    return tree | {name: Box(text, tuple(text.shape), (0,)) for name, text in objects.items()}


@dataclass
class LoadedState:
    """A state of Megatron that is being loaded. ``into``: the tree to restore into; the tensors of the state are filled."""

    into: State
    _sharded: ShardedStateDict = field(repr=False)
    _common: StateDict = field(repr=False)
    _local: StateDict = field(repr=False)
    _factories: ShardedStateDict = field(repr=False)

    def result(self) -> StateDict:
        """What ``dist_checkpointing.load`` returns: the common state with the loaded tensors and objects."""
        common = plain_objects.decode(self.into[COMMON])
        if "optimizer" in common and "optimizer" in self._common:
            common["optimizer"] = regrouped(common["optimizer"], self._common["optimizer"])
        merge(common, self._local)
        dict_list_map_inplace(self._loaded, self._sharded)
        merge(common, self._sharded)
        return apply_factory_merges(common, self._factories)

    def _loaded(self, leaf: ShardedBase) -> object:
        if not isinstance(leaf, ShardedObject):
            return leaf.data
        text = self.into[leaf.unique_key]
        return None if isinstance(text, AsSaved) else plain_objects.decode(text)  # it may be missing


def loaded_state(state: ShardedStateDict, saved_shape: Callable[[str], tuple[int, ...] | None]) -> LoadedState:
    """Prepare to load. ``saved_shape``: of a tensor whose shape may differ, such as an embedding that is padded."""
    force_all_tensors_to_non_fp8(state)
    rest, local, factories = load_preprocess(state)
    sharded, common = extract_sharded_base(rest)
    found, into = defaultdict[str, list[Box]](list), State()
    for leaf in nested_values(sharded):
        if isinstance(leaf, ShardedObject):
            into[leaf.unique_key] = AsSaved()
            continue
        if isinstance(leaf, ShardedTensor):
            leaf.init_data(torch.device("cpu") if not torch.cuda.is_available() else torch.cuda.current_device())
        for part in _parts(leaf):
            shape = (saved_shape(part.name) if part.resizable else None) or part.shape
            if (fitting := part if shape == part.shape else part.within(shape)) is not None:
                found[part.name].append(fitting.box())
    into |= {name: Boxes(tuple(boxes)) for name, boxes in found.items()}
    return LoadedState({**into, COMMON: AsSaved()}, sharded, common, local, factories)


def _parts(leaf: ShardedBase) -> Iterator[TensorPart]:
    if isinstance(leaf, FlatRange):
        main = is_main_replica(leaf.replica_id)
        for tensor, (offset, _), local in leaf.parts():
            yield _part(tensor, offset, local, main=main, replica=False)
    elif isinstance(leaf, ShardedTensor):
        local = leaf.data.detach()
        yield _part(leaf, (0,) * local.ndim, local, main=is_main_replica(leaf.replica_id), replica=True)
    else:
        raise StateError(f"a {type(leaf).__name__} cannot be stored", subject=leaf.key)


def _part(tensor: ShardedTensor, at: tuple[int, ...], local: torch.Tensor, *, main: bool, replica: bool) -> TensorPart:
    """``at``: where ``local`` is in this rank's part of a tensor."""
    ahead = tensor.prepend_axis_num
    offset = (*tensor.global_offset[:ahead], *(low + o for low, o in zip(tensor.global_offset[ahead:], at, strict=True)))
    return TensorPart(
        tensor.key, tuple(tensor.global_shape), offset, local[(None,) * ahead], main, replica, tensor.allow_shape_mismatch
    )


def _copied(node: ShardedStateDict) -> ShardedStateDict:
    """New dicts and lists with the same leaves: Megatron changes the containers that it gets."""
    if isinstance(node, dict):
        return {key: _copied(child) for key, child in node.items()}
    return [_copied(child) for child in node] if isinstance(node, list) else node


def _copied_buffer(leaf: ShardedBase) -> ShardedBase:
    """A copy of a buffer, which may change before the optimizer's step; all else as it is."""
    if not isinstance(leaf, ShardedTensor) or isinstance(leaf.data, torch.nn.Parameter) or leaf.data._is_view():
        return leaf
    return replace(leaf, data=leaf.data.clone()) if group(leaf.key) == WEIGHTS else leaf


def _tensors(node: object) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, dict | list | tuple):
        for child in node.values() if isinstance(node, dict) else node:
            yield from _tensors(child)
