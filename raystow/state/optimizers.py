"""The state of an optimizer by the names of its parameters, as ``torch.distributed.checkpoint.state_dict`` writes it.

``state.<parameter>.<key>`` and ``param_groups.<i>``, whose ``params`` are names. An optimizer without state needs no step to be
restored: memory for what was saved is made like its parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..storage.errors import StateError
from .dtensor_layout import is_dtensor
from .lossy.tensor_values import dtype_name
from .tree import Path, State, part_of, show

if TYPE_CHECKING:
    import torch

    from .as_saved import AsSaved
    from .object_marker import Mark


class OptimizerState:
    """An optimizer: a ``StateObject``. ``names``: of its parameters, by its groups in order. ``where``: names it in errors."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Sequence[str], where: str) -> None:
        self._optimizer, self._names, self._where = optimizer, names, where
        parameters = parameters_of(optimizer)
        self._parameters: dict[object, torch.Tensor] = {
            **dict(enumerate(parameters)),
            **dict(zip(names, parameters, strict=True)),
        }

    def saved(self) -> State:
        """The tree to save; its tensors are those of the optimizer."""
        whole, names = self._optimizer.state_dict(), self._names
        state = {names[key] if type(key) is int else key: value for key, value in whole["state"].items()}
        groups = [{**group, "params": [names[i] for i in group["params"]]} for group in whole["param_groups"]]
        return {**whole, "state": state, "param_groups": groups}

    def takes(self, path: Path) -> bool:
        """Whether a tensor at a path of the tree belongs to this optimizer. In a pipeline, other ranks have others."""
        return path[0] != "state" or path[1] in self._parameters or type(path[1]) is not str

    def memory(self, path: Path, dtype: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """The optimizer's tensor at a path, or a new one like the parameter that it belongs to; None if it is not like it."""
        import torch

        if path[0] != "state":
            return None
        parameter = self._parameters.get(path[1])
        own = part_of(self._optimizer.state.get(parameter), path[2:]) if parameter is not None else None
        if isinstance(own, torch.Tensor) and (is_dtensor(own) or (dtype_name(own.dtype), tuple(own.shape)) == (dtype, shape)):
            return own
        if parameter is None or path[-1] == "step" or not hasattr(torch, dtype):
            return None
        if tuple(parameter.shape) == shape:
            return torch.empty_like(parameter, dtype=getattr(torch, dtype), requires_grad=False)
        if is_dtensor(parameter) and shape:
            what = f"has {shape} for a sharded parameter of {tuple(parameter.shape)}: how it is sharded is not known"
            raise StateError(what, subject=show(path, self._where), remedy="make one optimizer step before the restore")
        return None

    def device(self, path: Path) -> str | torch.device:
        """Where a tensor is made that is not like its parameter."""
        parameter = self._parameters.get(path[1]) if path[0] == "state" else None
        return "cpu" if parameter is None or path[-1] == "step" else parameter.device

    def like(self) -> Mapping[str, torch.Tensor]:
        """The parameters by the names of their states: most tensors there are sharded as they are."""
        return {f"state.{name}": self._parameters[name] for name in self._names}

    def check(self, whole: object) -> None:
        """``StateError`` unless a tree has the groups and parameters of this optimizer."""
        if not isinstance(whole, dict) or not isinstance(whole.get("param_groups"), list):
            what = "the version has no state of an optimizer here"
            raise StateError(what, subject=self._where, remedy="restore a dict like the one that was saved")
        groups, at = whole["param_groups"], 0
        own = [len(group["params"]) for group in self._optimizer.param_groups]
        if len(groups) != len(own):
            raise StateError(f"has {len(own)} parameter groups, the version {len(groups)}", subject=self._where)
        for number, (group, size) in enumerate(zip(groups, own, strict=True)):
            saved, names = list(group.get("params", ())), self._names[at : at + size]
            at += size
            if all(type(name) is int for name in saved) and len(saved) == size:
                continue  # of optimizer.state_dict(): by their order
            if differ := sorted(set(map(str, saved)).symmetric_difference(names)):
                more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
                what = f"only this group or that of the version has {', '.join(differ[:3])}{more}"
                subject = f'{self._where}.param_groups[{number}]["params"]'
                raise StateError(what, subject=subject, remedy="give the optimizer the same parameters in the same groups")

    def into(self, mark: Mark) -> AsSaved:
        """Its place in the tree to restore into."""
        return mark(self)

    def load(self, tree: State) -> None:
        """Load a tree that ``check`` has accepted. Its tensors become those of the optimizer."""
        numbers: dict[object, int] = {name: i for i, name in enumerate(self._names)}
        found = {numbers.get(key, key): value for key, value in tree["state"].items()}
        state = {key: _ordered(found[key]) for key in sorted(found, key=lambda key: (type(key) is not int, key))}
        groups, at = [], 0
        for group, own in zip(tree["param_groups"], self._optimizer.param_groups, strict=True):
            groups.append({**group, "params": list(range(at, at := at + len(own["params"])))})
        self._optimizer.load_state_dict({**tree, "state": state, "param_groups": groups})
        parameters = parameters_of(self._optimizer)
        for key, values in state.items():
            if type(key) is int and isinstance(values, dict):
                self._keep_dtypes(parameters[key], values)

    def _keep_dtypes(self, parameter: torch.Tensor, values: Mapping[str, object]) -> None:
        """Undo that torch casts the state of a parameter to the dtype of the parameter: the bits are those that were saved."""
        import torch

        loaded = self._optimizer.state.get(parameter)
        for key, value in values.items():
            cast = loaded.get(key) if isinstance(loaded, dict) else None
            if isinstance(value, torch.Tensor) and isinstance(cast, torch.Tensor) and key != "step" and cast.dtype != value.dtype:
                loaded[key] = value


def _ordered(values: object) -> object:
    """The same dict with its keys in an order that all ranks have: some gather tensors in the order of the state."""
    return {key: values[key] for key in sorted(values, key=str)} if isinstance(values, dict) else values


def unwrapped_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer in the wrapper of accelerate, which takes no hooks itself."""
    import torch

    inner = getattr(optimizer, "optimizer", None)
    if "_optimizer_step_pre_hooks" in vars(optimizer) or not isinstance(inner, torch.optim.Optimizer):
        return optimizer
    return unwrapped_optimizer(inner)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters in the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parameter_names(optimizer: torch.optim.Optimizer, models: Mapping[str, Mapping[int, str]], where: str) -> list[str]:
    """The names of an optimizer's parameters: those in the smallest of the ``models`` that has all of them, or else with the
    model's name before them. ``models``: by name, the names of their parameters by ``id``; "": the names of other tensors.

    ``StateError`` naming a parameter that is not among these.
    """
    parameters = parameters_of(optimizer)
    around = [
        (len(names), name)
        for name, names in models.items()
        if len(names) and all(id(parameter) in names for parameter in parameters)
    ]
    if around:
        names = models[min(around)[1]]
        return [names[id(parameter)] for parameter in parameters]
    found = []
    for number, parameter in enumerate(parameters):
        of = [(len(names), name) for name, names in models.items() if id(parameter) in names]
        if not of:
            what = f"parameter {number} of {len(parameters)}, of shape {tuple(parameter.shape)}, is in no module of the state"
            raise StateError(what, subject=where, remedy="add it, or its module, to the state")
        model = min(of)[1]
        found.append(f"{model}.{models[model][id(parameter)]}".removeprefix("."))
    return found
