"""The tensors of a module by plain names, without the parts that DDP, ``torch.compile`` and activation checkpointing add."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ..storage.errors import StateError
from .tree import State
from .wrapper_tensors import is_composed
from .write_check import SMALL

if TYPE_CHECKING:
    import torch

_CHECKPOINTED = "_checkpoint_wrapped_module."
BY_DICTS = "pass get_state_dict(model, optimizer), made after a step, and call set_state_dict after a restore"
"""The remedy for models and optimizers that are not restored as objects."""
_WRAPPED = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
"""Classes of modules that contain another one, with its name."""


class ModuleState:
    """A module's state dict. ``module``: unwrapped. ``where``: names it in errors.

    Attributes:
        tree: Parameters, buffers and other entries by plain name; tensors share the memory of the module.
        own: The plain names of its parameters and buffers.
        changing: Those of all tensors but parameters: they may change in each forward pass.
    """

    def __init__(self, module: torch.nn.Module, where: str) -> None:
        import torch

        self.module = module = unwrapped(module)
        _check_kind(module, where)
        if _keeps_variables(module):  # parameters as they are: recognized, and loaded without a copy
            state = module.state_dict(keep_vars=True)
            parameters = [name for name, value in state.items() if isinstance(value, torch.nn.Parameter)]
            own = [name for name, value in state.items() if isinstance(value, torch.Tensor) and not name.endswith("_extra_state")]
        else:
            state = module.state_dict()
            parameters = [name for name, _ in module.named_parameters(remove_duplicate=False) if name in state]
            own = [*parameters, *(name for name, _ in module.named_buffers(remove_duplicate=False) if name in state)]
        self._state: Mapping[str, object] = state
        self._plain = plain_names(module, state)
        self.tree = {self._plain[name]: value for name, value in state.items()}
        self.own = {self._plain[name] for name in own}
        fixed = {self._plain[name] for name in parameters}
        self.changing = [name for name, value in self.tree.items() if name not in fixed and isinstance(value, torch.Tensor)]

    def saved(self) -> State:
        """The tree with copies of the tensors that change before the optimizer step; a save itself copies small ones of the
        host."""
        changing = [name for name in self.changing if self.tree[name].is_cuda or self.tree[name].nbytes > SMALL]
        return {**self.tree, **{name: self.tree[name].detach().clone() for name in changing}} if changing else self.tree

    def values(self) -> State:
        """The entries that are no parameters or buffers: of metrics, and what ``get_extra_state`` returns."""
        return {name: value for name, value in self.tree.items() if name not in self.own}

    def load_values(self, values: Mapping[str, object]) -> None:
        """Load what ``values`` returned. Tensors go to the devices of those that are there."""
        import torch

        state = dict[str, object]()
        for name, plain in self._plain.items():
            if plain in values and plain not in self.own:
                value, own = values[plain], self._state[name]
                moves = isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor)
                state[name] = value.to(own.device) if moves else value  # type: ignore[attr-defined]
        self.module.load_state_dict(state, strict=False)

    def names(self) -> dict[int, str]:
        """The plain name of each parameter by its ``id``; the first of several."""
        if _keeps_variables(self.module):
            found: Iterable[tuple[str, object]] = self.tree.items()
        else:
            parameters = dict(self.module.named_parameters())
            plain = plain_names(self.module, parameters)
            found = [(plain[name], parameter) for name, parameter in parameters.items()]
        return {id(value): name for name, value in reversed(list(found))}

    def load(self, tree: Mapping[str, object]) -> None:
        """Load a tree of the same names. Tensors that are the module's own are not copied; those that consist of others are left
        out, as their copy may be another one."""
        named = [(name, tree[plain]) for name, plain in self._plain.items() if plain in tree]
        state = OrderedDict((name, value) for name, value in named if value is not self._state[name] or not is_composed(value))
        if hasattr(self._state, "_metadata"):
            state._metadata = self._state._metadata  # type: ignore[attr-defined]
        if len(state) < len(named):
            self.module.load_state_dict(state, strict=False)
        else:
            self.module.load_state_dict(state)


def may_have_values(module: torch.nn.Module) -> bool:
    """Whether a module's state dict may have entries that are no parameters or buffers."""
    import torch

    plain = torch.nn.Module
    changed = ("state_dict", "_save_to_state_dict", "get_extra_state")
    return any(getattr(type(within), name) is not getattr(plain, name) for within in module.modules() for name in changed)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module in DDP and in ``torch.compile``."""
    while (name := _WRAPPED.get(type(module).__name__)) is not None and hasattr(module, name):
        module = getattr(module, name)
    return module


def plain_names(module: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The plain name of each name in a module."""
    plain = {name: name.replace(_CHECKPOINTED, "") for name in names}
    joined = "\0".join(plain)
    if not any(f"{part}." in joined for part in _WRAPPED.values()):
        return plain
    inner = [
        f"{name}.{part}."
        for name, within in module.named_modules(remove_duplicate=False)
        if (part := _WRAPPED.get(type(within).__name__)) is not None and name
    ]
    for around in sorted(inner, key=len, reverse=True):  # the innermost first, so that what is around it is found, too
        keep = around[: around[:-1].rindex(".") + 1]
        for name in plain:
            if name.startswith(around):
                plain[name] = plain[name].replace(around.replace(_CHECKPOINTED, ""), keep.replace(_CHECKPOINTED, ""), 1)
    return plain


_kept: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


def _keeps_variables(module: torch.nn.Module) -> bool:
    """Whether only ``nn.Module`` makes the state dict, which then has the parameters themselves."""
    import torch

    if module not in _kept:
        plain = torch.nn.Module
        changed = ("state_dict", "_save_to_state_dict")
        _kept[module] = all(
            getattr(type(within), name) is getattr(plain, name) for within in module.modules() for name in changed
        )
    return _kept[module]


def _check_kind(module: torch.nn.Module, where: str) -> None:
    """``StateError`` for FSDP of version 1, which makes a state dict by collectives."""
    fully_sharded = sys.modules.get("torch.distributed.fsdp")
    if fully_sharded is None or module in _kept:
        return
    if any(isinstance(within, fully_sharded.FullyShardedDataParallel) for within in module.modules()):
        raise StateError("has FullyShardedDataParallel in it", subject=where, remedy=f"use fully_shard, or {BY_DICTS}")
