"""What a run has named: models, optimizers, and the rest, whose values the journal records."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...orchestrator.journal.tracked_state import local
from ...state.lossy.tensor_values import dtype_name
from ...state.object_marker import Template
from ...state.object_places import built, is_object, places
from ...state.per_rank import PerRank
from ...state.rng import Rng
from ...state.state_object import load_object
from ...state.tree import Path, replace
from ...storage.errors import StateError
from ...storage.format.values import PLAIN
from ...storage.versions.value_tree import part_text

_RECORDED = torch.nn.Module | torch.optim.Optimizer | Rng
"""Classes of objects whose state is recorded otherwise."""
_REMEDY = "put it in a dict, which is filled in place"


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
        found = [(path, place.node) for path, place in places(self._whole, "run").items() if is_object(place.node)]
        self.models = {".".join(map(part_text, path)): one for path, one in found if isinstance(one, torch.nn.Module)}
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
        forms = {path: _recorded(place.node) for path, place in places(self._whole, "run").items()}
        values = built(self._whole, forms)
        return {"values": values, "rng": Rng().state_dict()} if self._draws else {"values": values}

    def load(self, recorded: Mapping[str, Any]) -> None:
        """Load what ``values`` returned.

        ``StateError`` if a tensor that was named by itself had another shape or dtype.
        """
        for name, value in recorded["values"].items():
            node = self._whole.get(name)
            filled = _filled(node, value, _own(node), ())
            if isinstance(node, torch.Tensor | np.ndarray) and filled is not node:
                raise StateError("has another shape or dtype than was recorded", subject=name, remedy=_REMEDY)
            replace(node, {(): filled})
        if self._draws:
            Rng().load_state_dict(recorded["rng"])


def check(name: str, value: object) -> None:
    """Raise ``StateError`` for an object that a restore cannot change in place."""
    if isinstance(value, torch.Tensor | np.ndarray | dict | list) or is_object(value):
        return
    remedy = "give its class state_dict() and load_state_dict(), or put what it consists of in a dict"
    if isinstance(value, (*PLAIN, tuple, np.generic)):
        remedy = _REMEDY
    raise StateError(f"a {type(value).__name__} cannot change in place", subject=name, remedy=remedy)


def _recorded(node: Any) -> object:
    """What is recorded of an object, or of a value below ``PerRank``."""
    if isinstance(node, _RECORDED):
        return None
    return node.state_dict() if is_object(node) else node


def _filled(node: Any, value: Any, own: Template, path: Path) -> object:
    """A recorded value whose tensors are in the memory of ``node``, where it had the same, and whose objects are loaded. ``own``:
    of what was named; ``path``: of the node there."""
    if isinstance(node, PerRank):
        node.value = replace(node.value, {(): _filled(node.value, value, _own(node.value), ())})
        return node
    if isinstance(node, _RECORDED):
        return node
    if is_object(node):
        load_object(node, value)
        return node
    if isinstance(value, dict):
        there, made = node if isinstance(node, dict) else {}, copy.copy(value)  # of its class
        made.update((key, _filled(there.get(key), one, own, (*path, key))) for key, one in value.items())
        return made
    if isinstance(value, list | tuple):
        kind, items = "list" if isinstance(value, list) else "tuple", node if isinstance(node, list | tuple) else ()
        pairs = itertools.zip_longest(value, items[: len(value)])
        return type(value)(_filled(item, one, own, (*path, (kind, i))) for i, (one, item) in enumerate(pairs))
    if not isinstance(value, torch.Tensor | np.ndarray):
        return value
    memory = own.memory(path, dtype_name(value.dtype), tuple(value.shape))
    if isinstance(memory, torch.Tensor) and isinstance(value, torch.Tensor):
        local(memory).copy_(value)
        return memory
    if isinstance(memory, np.ndarray) and isinstance(value, np.ndarray):
        memory[...] = value
        return memory
    return value.to(own.device(path)) if isinstance(value, torch.Tensor) else value


def _own(node: object) -> Template:
    return Template(lambda: node)
