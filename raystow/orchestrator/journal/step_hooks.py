"""Hooks on ``Optimizer.step``: they copy the gradients that a step sees, and give them back in a replay."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...storage.errors import StateError
from .tracked_state import TrackedState, gradient_of, like, local

_SCALE = ("grad_scale", "found_inf")
"""Attributes by which ``GradScaler`` tells a fused optimizer to unscale gradients, and to skip a step."""


@dataclass(frozen=True)
class StepInputs:
    """What one call of ``step`` depends on, besides the state. ``groups``: hyper-parameters without the parameters; none of
    a group that a replay leaves as it is. Tensors that are replayed may be in host memory."""

    optimizer: int
    groups: Sequence[Mapping[str, object]]
    gradients: Sequence[torch.Tensor | None]
    scale: Mapping[str, torch.Tensor] = field(default_factory=dict)


class StepHooks:
    """Calls ``on_step`` before each step of the optimizers; after gradients were computed, if ``step`` is given a closure. Its
    arguments: the number of the optimizer, and whether the step has called its closure before.

    Hooks that were registered before act on the gradients first. In a replay they run again, before the recorded gradients are
    put in place, and hooks that were registered later run after it: as when the step was recorded.
    """

    def __init__(self, state: TrackedState, on_step: Callable[[int, bool], None]) -> None:
        self._state, self._on_step = state, on_step
        self._replayed: StepInputs | None = None
        self._handles = [
            optimizer.register_step_pre_hook(functools.partial(self._before_step, number))
            for number, optimizer in enumerate(state.optimizers)
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def set_groups(self, number: int, groups: Sequence[Mapping[str, object]]) -> None:
        """Set the recorded hyper-parameters of an optimizer; others stay as they are."""
        there = self._state.optimizers[number].param_groups
        if len(groups) != len(there):
            raise StateError(f"{len(groups)} parameter groups were recorded, there are {len(there)}")
        for group, recorded in zip(there, groups, strict=True):
            for name, value in recorded.items():
                _set(group, name, value)

    def replay(self, inputs: StepInputs) -> None:
        """Call ``step`` with recorded inputs; the gradients are gone afterwards."""
        optimizer = self._state.optimizers[inputs.optimizer]
        self.set_groups(inputs.optimizer, inputs.groups)
        device = next((one.device for one in self._state.parameters(inputs.optimizer)), None)
        for name, value in inputs.scale.items():
            setattr(optimizer, name, value.to(device))
        self._replayed = inputs
        try:
            optimizer.step()
        finally:
            self._replayed = None
            for name in inputs.scale:
                delattr(optimizer, name)
            for parameter in self._state.parameters(inputs.optimizer):
                parameter.grad = None

    def _before_step(
        self, number: int, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        if self._replayed is not None:
            self._give(self._replayed)
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._on_step(number, False)
            return None
        calls = itertools.count()

        def observed() -> object:
            loss = closure()
            self._on_step(number, next(calls) > 0)
            return loss

        if len(args) > 1:
            return (args[0], observed, *args[2:]), kwargs
        return args, {**kwargs, "closure": observed}

    def _give(self, inputs: StepInputs) -> None:
        parameters = self._state.parameters(inputs.optimizer)
        if len(parameters) != len(inputs.gradients):
            raise StateError(f"gradients of {len(inputs.gradients)} parameters were recorded, there are {len(parameters)}")
        for parameter, gradient in zip(parameters, inputs.gradients, strict=True):
            if gradient is None:
                parameter.grad = None
                continue
            part = local(parameter)
            if gradient.shape != part.shape:
                raise StateError(f"a gradient of {tuple(gradient.shape)} was recorded for a parameter of {tuple(part.shape)}")
            parameter.grad = like(parameter, gradient.to(part.device, non_blocking=True))


class GradientBuffers:
    """Copies gradients into memory that is used again for each entry: on their own device, so one set of gradients more."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int], list[torch.Tensor | None]] = {}
        self._calls = 0

    def begin(self) -> None:
        """Use the memory again: nothing that was copied is read any more."""
        self._calls = 0

    def capture(self, state: TrackedState, number: int) -> StepInputs:
        """Copy what the next step of an optimizer depends on, on the current stream.

        Raises ``StateError`` for gradients that cannot be recorded.
        """
        optimizer = state.optimizers[number]
        gradients = [gradient_of(parameter) for parameter in state.parameters(number)]
        copies = self._copies.get((self._calls, number), [])
        if [_layout(copy) for copy in copies] != [_layout(gradient) for gradient in gradients]:
            copies = [None if one is None else torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in gradients]
            self._copies[self._calls, number] = copies
        self._calls += 1
        targets = [copy for copy in copies if copy is not None]
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, [gradient for gradient in gradients if gradient is not None])
        scale = {name: value.clone() for name in _SCALE if isinstance(value := getattr(optimizer, name, None), torch.Tensor)}
        return StepInputs(number, hyper_parameters(optimizer), list(copies), scale)


def _layout(tensor: torch.Tensor | None) -> object:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def hyper_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    """Copies of the parameter groups without the parameters; tensors on their device."""
    return [{key: _kept(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _kept(value: object) -> object:
    return local(value).clone() if isinstance(value, torch.Tensor) else value


def _set(group: dict[str, object], name: str, value: object) -> None:
    """Set a hyper-parameter; a tensor in place, since the optimizer may have captured its address."""
    if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
        local(group[name]).copy_(value)
    else:
        group[name] = value
