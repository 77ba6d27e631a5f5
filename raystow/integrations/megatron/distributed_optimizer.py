"""Lets ``DistributedOptimizer`` of Megatron-Core give its state by parameters, without a gather, and take it back.

Megatron names this format ``fully_sharded_model_space``. It is the default of ``DistributedOptimizer.sharded_state_dict``, but
Megatron's own tensors of 0.19 refuse the flat ranges that it consists of. ``replace_methods`` makes it work. It also mends loads
of torch's AdamW, which Megatron uses without Transformer Engine and Apex: Megatron asks a new optimizer for its step, and loads
one tensor as the step of all parameters, which then counts each step once for each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from ...state.tree import State
from ...storage.errors import StateError
from ...storage.extras import check_methods
from .flat_range import FlatRange

FORMAT = "fully_sharded_model_space"
"""Megatron's name for a state by parameters."""
FORMAT_KEY = "distrib_optim_sharding_type"
"""The metadata that names the format."""

check_methods(
    DistributedOptimizer,
    (
        "sharded_state_dict",
        "sharded_param_state_fs_model_space",
        "load_parameter_state_from_fs_model_space",
        "_get_main_param_and_optimizer_states",
        "load_state_dict",
        "state_dict",
    ),
)

_megatron_state, _megatron_load = DistributedOptimizer.sharded_state_dict, DistributedOptimizer.load_state_dict


@functools.cache
def replace_methods() -> None:
    """Replace the methods of the class."""
    DistributedOptimizer.sharded_state_dict = sharded_state_dict
    DistributedOptimizer.load_state_dict = load_state_dict
    DistributedOptimizer.sharded_param_state_fs_model_space = flat_ranges
    DistributedOptimizer.load_parameter_state_from_fs_model_space = take_ranges


def sharded_state_dict(
    self: DistributedOptimizer,
    model_sharded_state_dict: ShardedStateDict = {},  # noqa: B006  as Megatron's
    is_loading: bool = False,
    sharding_type: str | None = None,
    metadata: State | None = None,
) -> ShardedStateDict:
    """As Megatron's, which needs moments to be there. ``StateError`` for an optimizer that is not supported."""
    chosen = (metadata or {}).get(FORMAT_KEY, FORMAT) if sharding_type is None else sharding_type
    if chosen == FORMAT:
        _check(self)
    of_torch = isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW)
    if is_loading and not self.optimizer.state and (of_torch or chosen == FORMAT):
        _initialize(self)
    return _megatron_state(self, model_sharded_state_dict, is_loading, sharding_type, metadata)


def load_state_dict(self: DistributedOptimizer, state_dict: StateDict) -> None:
    """As Megatron's, and give each parameter a step of its own."""
    _megatron_load(self, state_dict)
    for state in self.optimizer.state.values():
        if isinstance(step := state.get("step"), torch.Tensor):
            state["step"] = step.clone()


def flat_ranges(
    self: DistributedOptimizer,
    model_sharded_state_dict: ShardedStateDict,
    is_loading: bool = False,
    metadata: State | None = None,
) -> ShardedStateDict:
    """The ranges of the weights and moments that this rank has, by the number of the parameter and the name of the tensor."""
    sharded, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    stored = {id(tensor.data): tensor for tensor in nested_values(sharded)}
    state: ShardedStateDict = {}
    for number, (parameter, start, tensors) in enumerate(_tensors(self)):
        if id(parameter) not in stored:
            what = "a parameter of the optimizer is not in the state of the model"
            raise StateError(what, remedy="pass the model's sharded_state_dict(), before it is saved or loaded")
        of = stored[id(parameter)]
        replica = (*of.replica_id[:2], self.distributed_optimizer_instance_id)
        state[number] = {
            name: FlatRange(f"optimizer.state.{name}.{of.key}", tensor, replica, of, start)
            for name, tensor in tensors.items()
            if tensor.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr()  # fp32 weights are the model's
        }
    return state


def take_ranges(self: DistributedOptimizer, state: ShardedStateDict) -> None:
    """Take the loaded ranges. They are in the memory of the optimizer already, unless it has made new tensors since."""
    with torch.no_grad():
        for number, (_, _, tensors) in enumerate(_tensors(self)):
            for name, loaded in state.get(number, {}).items():
                if loaded.data_ptr() != tensors[name].data_ptr():
                    tensors[name].copy_(loaded)


def torch_optimizers(optimizer: object) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers of torch below one of Megatron, which may be a chain; a stage without parameters has none."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return tuple(inner for one in chain if (inner := getattr(one, "optimizer", None)) is not None)


def _tensors(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, int, dict[str, torch.Tensor]]]:
    """Each parameter of which this rank has a range, the first element of that, and the optimizer's tensors of it by name."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    tensors = optimizer._get_main_param_and_optimizer_states(parameter)
                    named = {"fp32_param" if name == "param" else name: tensor for name, tensor in tensors.items()}
                    flat = {name: tensor for name, tensor in named.items() if tensor.ndim}  # a step has no dimensions
                    yield parameter, ranges["param"].start, flat


def _initialize(optimizer: DistributedOptimizer) -> None:
    """Create moments that are zero, as before the first step."""
    groups = [{**group, "step": 0} for group in optimizer.optimizer.param_groups]
    scale = {"grad_scaler": optimizer.grad_scaler.state_dict()} if optimizer.grad_scaler else {}
    optimizer.load_state_dict({"optimizer": {"param_groups": groups}, **scale})
    for state in optimizer.optimizer.state.values():
        for tensor in state.values():
            if isinstance(tensor, torch.Tensor):
                tensor.zero_()


def _check(optimizer: DistributedOptimizer) -> None:
    problem = ""
    if optimizer.ddp_config.use_megatron_fsdp:
        problem = "uses Megatron-FSDP"
    elif optimizer.config.use_precision_aware_optimizer:
        problem = "is precision-aware (--use-precision-aware-optimizer)"
    elif isinstance(optimizer.optimizer, HybridDeviceOptimizer):
        problem = "is offloaded to the CPU (--optimizer-cpu-offload)"
    if problem:
        raise StateError(f"the optimizer {problem}", remedy="see docs/megatron.md for what is supported")
