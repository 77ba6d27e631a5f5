"""What a run has named: models, optimizers, and the rest, whose values the journal records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ...state.object_places import is_object
from ...state.rng import Rng
from ...state.state_object import load_object
from ...storage.errors import StateError
from ...storage.format.values import PLAIN

_RECORDED = torch.nn.Module | torch.optim.Optimizer | Rng
"""Classes of objects whose state is recorded otherwise."""


class Members:
    """The objects of a run.

    Attributes:
        models: Modules, by path.
        optimizers: Optimizers, in the order of their paths.
        own: Says that each rank has objects of its own; empty if none has.
    """

    def __init__(self, shared: Mapping[str, object], per_rank: Mapping[str, object]) -> None:
        self._whole = {**shared, **per_rank}
        self.own = f"each rank has {', '.join(per_rank)} of its own" if per_rank else ""
        found = list(_objects(self._whole, ""))
        self.models = {path: one for path, one in found if isinstance(one, torch.nn.Module)}
        self._draws = any(isinstance(one, Rng) for _, one in found)
        self.optimizers = [one for _, one in found if isinstance(one, torch.optim.Optimizer)]

    @property
    def model(self) -> torch.nn.Module:
        """The model that the journal checks: all modules as one, if there are several."""
        if len(self.models) == 1:
            return next(iter(self.models.values()))
        return torch.nn.ModuleDict({path.replace(".", "/"): one for path, one in self.models.items()})

    def values(self) -> dict[str, object]:
        """Return what the journal must record of the objects besides models and optimizers: generators last, as others draw."""
        values = _values(self._whole)
        return {"values": values, "rng": Rng().state_dict()} if self._draws else {"values": values}

    def load(self, recorded: Mapping[str, Any]) -> None:
        """Load what ``values`` returned."""
        _load(self._whole, recorded["values"])
        if self._draws:
            Rng().load_state_dict(recorded["rng"])


def check(name: str, value: object) -> None:
    """Raise ``StateError`` for an object that a restore cannot change in place."""
    if isinstance(value, torch.Tensor | np.ndarray | dict | list) or is_object(value):
        return
    remedy = "give its class state_dict() and load_state_dict(), or put what it consists of in a dict"
    if isinstance(value, (*PLAIN, tuple, np.generic)):
        remedy = "put it in a dict, which is filled in place"
    raise StateError(f"a {type(value).__name__} cannot change in place", subject=name, remedy=remedy)


def _objects(node: object, path: str) -> Iterator[tuple[str, object]]:
    for key, value in _items(node):
        yield from _objects(value, f"{path}.{key}" if path else str(key))
    if is_object(node):
        yield path, node


def _items(node: object) -> Iterator[tuple[object, object]]:
    if isinstance(node, dict):
        yield from node.items()
    elif isinstance(node, list | tuple):
        yield from enumerate(node)


def _values(node: Any) -> object:
    if isinstance(node, _RECORDED):
        return None
    if isinstance(node, dict):
        return {key: _values(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_values(value) for value in node]
    return node.state_dict() if is_object(node) else node


def _load(node: Any, values: Any) -> Any:
    """Load values into a node, and return what stands at its place afterwards."""
    if isinstance(node, _RECORDED):
        return node
    if isinstance(node, dict):
        node.update({key: _load(node.get(key), value) for key, value in values.items()})
        for key in node.keys() - values.keys():
            del node[key]
        return node
    if isinstance(node, list):
        node[:] = [_load(node[i] if i < len(node) else None, value) for i, value in enumerate(values)]
        return node
    if isinstance(node, tuple):
        return type(node)(_load(one, value) for one, value in zip(node, values, strict=True))
    if is_object(node):
        load_object(node, values)
        return node
    if isinstance(node, torch.Tensor):
        with torch.no_grad():
            node.copy_(values)
        return node
    if isinstance(node, np.ndarray):
        node[...] = values
        return node
    return values
