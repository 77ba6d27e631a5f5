"""The state of a DeepSpeed engine by parameter names, as ``torch.distributed.checkpoint.state_dict`` names it.

model.<name>                        weights in the precision of the model, and buffers
master.<name>                       weights in the precision of the optimizer
optim.state.<name>.<key>            moments and steps
optim.param_groups.<i>.<option>     learning rates, and the names of the parameters
progress                            counters, loss scale, learning rate schedule, ``client_state``
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from ...state.as_saved import CheckedAsSaved
from ...state.tree import State
from ...storage.errors import StateError
from ...storage.format.values import is_plain
from .partitions import Engine, ParameterGroup, groups, partition_of

logger = logging.getLogger(__name__)

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_OFFLOAD_BUFFER = "_offload_buffer"
"""``offload_states`` of ZeRO 3 adds a copy of each moment to the optimizer's state under a key with this end."""


@dataclass(frozen=True)
class EngineState:
    """``tree``: to save, or to restore into. ``steps``: the optimizer's state of each flat tensor, and the dict of ``tree`` that
    has the values of it that are no tensors."""

    tree: State
    groups: list[ParameterGroup]
    steps: list[tuple[State, State]] = field(default_factory=list)


def engine_state(engine: Engine) -> EngineState:
    """Return the state without ``progress``. An optimizer without moments is initialized first. Buffers are copied, because
    unlike parameters they change before the optimizer step. Raises ``StateError`` if ZeRO 1 or 2 has offloaded the weights: the
    model has none then."""
    if engine.zero_optimization_stage() < 3 and "lp_params" in getattr(engine.optimizer, "offloaded_states", ()):
        raise StateError("the weights of the model are offloaded", remedy="call engine.reload_states() first")
    module, optimizer = engine.module, engine.optimizer.optimizer
    found = EngineState({"model": {}, "master": {}, "optim": {"state": {}, "param_groups": []}}, list(groups(engine)))
    names = {parameter: name for name, parameter in module.named_parameters()}
    group_of = {parameter: group for group in found.groups for parameter in group.parameters}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        group = group_of.get(parameter)
        if group is None and engine.zero_optimization_stage() < 3:
            found.tree["model"][name] = parameter
            continue
        partition = partition_of(engine, parameter, group.flats if group else ())
        found.tree["model"][name] = partition.boxes()
        if partition.flat is None or names[parameter] != name:
            continue  # frozen, or a second name of a tied parameter
        found.tree["master"][name] = partition.boxes(partition.flat)
        _initialize(optimizer, group, partition.flat)
        state = optimizer.state[partition.flat]
        flat = {key for key, value in state.items() if torch.is_tensor(value) and value.shape == partition.flat.shape}
        kept = {key: value for key, value in state.items() if not key.endswith(_OFFLOAD_BUFFER)}
        own = {key: partition.boxes(value) if key in flat else value for key, value in kept.items()}
        found.tree["optim"]["state"][name] = own
        found.steps.append((state, own))
    for group in found.groups:
        options = {key: value for key, value in group.options.items() if key != "params" and not key.startswith("_")}
        found.tree["optim"]["param_groups"].append({**options, "params": [names[p] for p in group.parameters]})
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                found.tree["model"][f"{prefix}.{name}" if prefix else name] = buffer.clone()
    return found


def groups_as_saved(found: EngineState) -> CheckedAsSaved:
    """The marker that takes the groups. A restore raises ``StateError``, and changes nothing, if the version has the parameters
    in other groups, or the steps elsewhere: a list of plain values would be restored whatever it holds."""

    def check(restored: object) -> None:
        saved = restored if isinstance(restored, list) else []
        sizes, saved_sizes = [len(group.parameters) for group in found.groups], [len(group["params"]) for group in saved]
        if sizes != saved_sizes:
            what = f"the optimizer's groups have {sizes} parameters, but the version holds groups of {saved_sizes}"
            raise StateError(what, remedy="use the groups of the save, or load_optimizer_states=False")
        for number, (group, options) in enumerate(zip(found.groups, saved, strict=True)):
            if ("step" in group.options) != ("step" in options):
                who = ("this optimizer", "that of the save")["step" in options]
                raise StateError(f"only {who} counts steps in its groups: optim.param_groups.{number}.step")

    return CheckedAsSaved(check=check)


def apply_moments(engine: Engine, found: EngineState, options: list[State]) -> None:
    """Give the optimizer the restored values that are no tensors: steps, and the ``options`` of its groups."""
    for state, restored in found.steps:
        state.update({key: value for key, value in restored.items() if is_plain(value)})
    for group, restored in zip(found.groups, options, strict=True):
        group.options.update({key: value for key, value in restored.items() if key != "params"})
    if engine.zero_optimization_stage() < 3:
        engine.optimizer._lazy_init_hp_params_optimizer_state()  # as after the first step


def apply_weights(engine: Engine, found: EngineState) -> None:
    """Give the model the restored weights and buffers."""
    buffers = dict(engine.module.named_buffers())
    with torch.no_grad():
        for name in found.tree["model"].keys() & buffers.keys():
            buffers[name].copy_(found.tree["model"][name])
    gather_persistent(engine)
    if engine.zero_optimization_stage() < 3:
        engine.optimizer.update_lp_params()  # gathers the weights of other ranks


def gather_persistent(engine: Engine) -> None:
    """Gather the parameters that stay whole on each rank in ZeRO 3."""
    if engine.zero_optimization_stage() == 3:
        engine.optimizer.checkpoint_event_epilogue()


def engine_progress(engine: Engine, client_state: State) -> State:
    """Everything that is no parameter."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    scale = None if scaler is None else {key: value for key, value in vars(scaler).items() if is_plain(value)}
    return {
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        "loss_scale": scale,
        "client_state": client_state,
        **{name: part.state_dict() for name, part in _stateful(engine).items()},
    }


def apply_progress(engine: Engine, progress: State, *, schedule: bool) -> None:
    """Set what ``engine_progress`` has returned. ``schedule``: also the learning rate schedule."""
    for name, value in progress["counters"].items():
        setattr(engine, name, value)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    saved = progress["loss_scale"] or {}
    if scaler is not None and saved.keys() == {key for key, value in vars(scaler).items() if is_plain(value)}:
        vars(scaler).update(saved)
    elif scaler is not None:
        logger.warning("the loss scale is not restored: it was saved by another kind of loss scaler")
    for name, part in _stateful(engine).items():
        if name in progress and (schedule or name != "lr_scheduler"):
            part.load_state_dict(progress[name])


def _stateful(engine: Engine) -> State:
    data = engine.training_dataloader if engine.curriculum_learning_enabled() else None
    parts = {
        "lr_scheduler": engine.lr_scheduler,
        "random_ltd": engine.random_ltd_scheduler if engine.random_ltd_enabled() else None,
        "data_sampler": None if data is None else data.data_sampler,
        "grad_scaler": getattr(engine.optimizer, "torch_autocast_gradscaler", None),
    }
    return {name: part for name, part in parts.items() if part is not None}


def _initialize(optimizer: torch.optim.Optimizer, group: ParameterGroup | None, flat: torch.Tensor) -> None:
    """Create the moments of a flat tensor, and options such as FusedAdam's step, as the first step would: by a step at learning
    rate 0, and then all zero."""
    if optimizer.state.get(flat) or group is None:
        return
    before, gradient, options = optimizer.param_groups, flat.grad, {**group.options, "params": [flat], "lr": 0.0}
    flat.grad, optimizer.param_groups = torch.zeros_like(flat), [options]
    try:
        optimizer.step()
    finally:
        flat.grad, optimizer.param_groups = gradient, before
    for key in options.keys() - group.options.keys():
        group.options[key] = 0 if key == "step" else options[key]
    state = optimizer.state[flat]
    for key, value in state.items():
        if torch.is_tensor(value):
            value.zero_()
        elif key == "step":
            state[key] = 0
