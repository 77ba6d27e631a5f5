"""The state that a journal keeps track of: the parameters and buffers of a model, and its optimizers with their state."""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar, cast

import torch

from ...state import value_text
from ...state.modules import ModuleState, may_have_values, plain_names, unwrapped
from ...state.optimizers import unwrapped_optimizer
from ...state.tree import State
from ...storage.errors import StateError

_T = TypeVar("_T")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SPACE = 3  # free memory of a GPU, in sizes of the state, from which on the state is copied within it


class NamedTensor(NamedTuple):
    """This rank's part of a tensor of the state. ``parameter``: number of the parameter that it is, or belongs to."""

    name: str
    tensor: torch.Tensor
    parameter: int


class TrackedState:
    """All that a step of the optimizers changes, or depends on.

    References to the parameters are taken once: during a forward pass, FSDP2 puts other tensors into the model. Those of
    parameters that join the model and an optimizer later are taken when the state is listed.
    """

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(map(unwrapped_optimizer, optimizers))
        for one in self.optimizers:
            if (closure := inspect.signature(one.step).parameters.get("closure")) and closure.default is closure.empty:
                what = "each step needs a closure, which cannot be replayed"
                raise StateError(what, subject=type(one).__name__, remedy="use no journal with this optimizer")
        self._model = unwrapped(model)
        self._weights = self._named(self._model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._weights.items()}
        self._has_values = may_have_values(model)
        self._listed: tuple[list[tuple[int, int]], list[NamedTensor]] = ([], [])

    def parameters(self, optimizer: int) -> list[torch.Tensor]:
        """The parameters of an optimizer, in the order of its groups."""
        return [parameter for group in self.optimizers[optimizer].param_groups for parameter in group["params"]]

    def tensors(self) -> list[NamedTensor]:
        """The parameters of the model and of the optimizers, and the optimizers' state, without the model's buffers.

        The same list as before while all tensors are where they were: each step asks for it.
        """
        values = [value for one in self.optimizers for state in one.state.values() for value in state.values()]
        values += [parameter for one in self.optimizers for group in one.param_groups for parameter in group["params"]]
        places = [_place(value) for value in (*values, *self._weights.values()) if isinstance(value, torch.Tensor)]
        if places != self._listed[0]:
            self._listed = places, self._list()
        return self._listed[1]

    def _adopt(self) -> None:
        """Name the parameters that have joined model and optimizers, as a restarted process names them."""
        new = {id(one) for number in range(len(self.optimizers)) for one in self.parameters(number)} - self._names.keys()
        now = self._named(self._model.named_parameters()) if new else {}
        if any(id(one) in new for one in now.values()):
            known = new | self._names.keys()
            self._weights = {name: one if id(one) in known else self._weights.get(name, one) for name, one in now.items()}
            self._names = {id(parameter): name for name, parameter in self._weights.items()}

    def _list(self) -> list[NamedTensor]:
        self._adopt()
        numbers = {id(parameter): number for number, parameter in enumerate(self.all_parameters())}
        found = [NamedTensor(name, local(one), numbers[id(one)]) for name, one in self._weights.items()]
        for name, parameter, state in self._states():
            number = numbers[id(parameter)]
            if id(parameter) not in self._names:
                found.append(NamedTensor(name, local(parameter), number))
            tensors = ((key, value) for key, value in state.items() if isinstance(value, torch.Tensor))
            found += [NamedTensor(f"{name}.{key}", local(value), number) for key, value in tensors]
        return found

    def _named(self, tensors: Iterable[tuple[str, _T]]) -> dict[str, _T]:
        """Tensors of the model by the names that they have without wrappers."""
        named = dict(tensors)
        plain = plain_names(self._model, named)
        return {plain[name]: tensor for name, tensor in named.items()}

    def plain_values(self) -> str:
        """The parts of the optimizers' state that are no tensors, as text."""
        return repr(
            [
                (name, key, value)
                for name, _, state in self._states()
                for key, value in state.items()
                if not isinstance(value, torch.Tensor)
            ]
        )

    def buffers(self) -> dict[str, torch.Tensor]:
        """The model's buffers: a forward pass may change them, which a replay does not repeat."""
        return {name: local(buffer) for name, buffer in self._named(self._model.named_buffers()).items()}

    def module_values(self) -> dict[str, object]:
        """What the model's state dict has besides parameters and buffers: a forward pass may change it, too."""
        return ModuleState(self._model, "model").values() if self._has_values else {}

    def load_module_values(self, values: Mapping[str, object]) -> None:
        """Load what ``module_values`` returned."""
        if values:
            ModuleState(self._model, "model").load_values(values)

    def copy(self) -> StateCopy:
        """Copy all of it: within the memory of a GPU that has enough of it, else to host memory."""
        nbytes = Counter[torch.device]()
        for one in self.tensors():
            nbytes[one.tensor.device] += one.tensor.numel() * one.tensor.itemsize
        full = {device for device, size in nbytes.items() if _free(device) < _SPACE * size}

        def part(tensor: torch.Tensor) -> torch.Tensor:
            mine = local(tensor)
            return mine.to("cpu" if mine.device in full else mine.device, copy=True)

        def copied(value: object) -> object:
            return part(value) if isinstance(value, torch.Tensor) else _duplicate(value)

        tensors = {id(parameter): part(parameter) for parameter in self.all_parameters()}
        states = [
            {parameter: {key: copied(value) for key, value in state.items()} for parameter, state in optimizer.state.items()}
            for optimizer in self.optimizers
        ]
        groups = [
            [{key: copied(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for optimizer in self.optimizers
        ]
        buffers = {name: part(buffer) for name, buffer in self.buffers().items()}
        return StateCopy(tensors, states, groups, buffers, value_text.dumps(self.module_values()))

    def restore(self, kept: StateCopy) -> None:
        """Set everything to what ``copy`` has returned, in place where tensors are there."""
        with torch.no_grad():
            for parameter in self.all_parameters():
                local(parameter).copy_(kept.tensors[id(parameter)])
            for optimizer, states, groups in zip(self.optimizers, kept.states, kept.groups, strict=True):
                for parameter in [parameter for parameter in optimizer.state if parameter not in states]:
                    del optimizer.state[parameter]
                for parameter, state in states.items():
                    _put(optimizer.state[parameter], state)
                for group, values in zip(optimizer.param_groups, groups, strict=True):
                    _put(group, values)
            for name, buffer in self.buffers().items():
                buffer.copy_(kept.buffers[name])
        self.load_module_values(cast(State, value_text.loads(kept.module_values)))

    def all_parameters(self) -> list[torch.Tensor]:
        """The parameters of the model, and those that only optimizers have."""
        others = [one for number in range(len(self.optimizers)) for one in self.parameters(number)]
        return list({id(one): one for one in (*self._weights.values(), *others)}.values())

    def _states(self) -> Iterator[tuple[str, torch.Tensor, Mapping[str, object]]]:
        """The name and the state of each parameter of the optimizers."""
        for number, optimizer in enumerate(self.optimizers):
            for place, parameter in enumerate(self.parameters(number)):
                name = self._names.get(id(parameter), f"optimizer {number}, parameter {place}")
                yield name, parameter, optimizer.state.get(parameter, {})


class StateCopy(NamedTuple):
    """A copy of a ``TrackedState``: parameters by identity, states, groups, buffers, and ``module_values`` as text."""

    tensors: Mapping[int, torch.Tensor]
    states: Sequence[Mapping[torch.Tensor, Mapping[str, object]]]
    groups: Sequence[Sequence[Mapping[str, object]]]
    buffers: Mapping[str, torch.Tensor]
    module_values: str


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, on which changes are made in place."""
    part = getattr(tensor, "_local_tensor", None)  # of a DTensor; ``to_local`` would record a gradient
    return tensor.detach() if part is None else part.detach()


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    part = tensor if type(tensor) in _PLAIN else getattr(tensor, "_local_tensor", tensor)
    return part.data_ptr(), part.numel()


def like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A gradient for ``parameter`` from this rank's part of it."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of a parameter's gradient; ``StateError`` if the gradient is sparse or not placed as the parameter."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_sparse:
        raise StateError("gradients that are sparse tensors cannot be recorded", remedy="use dense gradients, or no journal")
    if getattr(gradient, "placements", None) != getattr(parameter, "placements", None):
        raise StateError("a gradient is not placed as its parameter is", remedy="redistribute it before the step")
    return local(gradient)


def _free(device: torch.device) -> float:
    """Bytes that can be allocated on a device."""
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return float(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _put(target: dict[str, object], values: Mapping[str, object]) -> None:
    for key in [key for key in target if key not in values and key != "params"]:
        del target[key]
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and isinstance(target.get(key), torch.Tensor):
            local(target[key]).copy_(value)
        else:
            target[key] = _duplicate(value)


def _duplicate(value: object) -> object:
    """A copy of a value, or the value itself if it cannot be copied."""
    try:
        return copy.deepcopy(value)
    except Exception:  # of its own ``__deepcopy__`` or ``__reduce_ex__``
        return value
