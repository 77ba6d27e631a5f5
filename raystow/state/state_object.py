"""The objects of a state by kind: what is saved of them, what stands for them in the tree to restore into, and how they load."""

from __future__ import annotations

import functools
import logging
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from ..storage.errors import StateError
from .modules import ModuleState
from .object_marker import Mark, Template, tensors_in
from .tree import Elements, Path, Placeholder, State, replace

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """An object that a state may contain."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> object: ...


class StateObject(Protocol):
    """An object of a state, or a value that each rank has for itself."""

    def saved(self) -> object:
        """What is saved of it."""

    def into(self, mark: Mark) -> object:
        """What stands for it in the tree to restore into."""

    def load(self, restored: State) -> object:
        """Load what a restore has put there, and return what takes its place in the state."""


class ModuleObject:
    """A module. ``where``: names it in errors. ``per_rank``: see ``ObjectMarker``."""

    def __init__(self, module: torch.nn.Module, where: str, *, per_rank: bool) -> None:
        self.state, self._where, self._per_rank = ModuleState(module, where), where, per_rank

    def saved(self) -> object:
        return self.state.saved()

    def into(self, mark: Mark) -> object:
        if self._per_rank:
            return mark(Template(lambda: self.state.tree, self._check))
        own = self.state.own
        return {
            name: one if name in own else mark(Template(functools.partial(_same, one))) for name, one in self.state.tree.items()
        }

    def load(self, restored: State) -> object:
        self.state.load({n: self.state.tree.get(n) if isinstance(one, Placeholder) else one for n, one in restored.items()})
        return None

    def _check(self, whole: object) -> None:
        saved = whole.keys() if isinstance(whole, dict) else set[str]()
        if differ := sorted(map(str, saved ^ self.state.tree.keys())):
            more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
            raise StateError(f"only this module or the saved one has {', '.join(differ[:3])}{more}", subject=self._where)


class OtherObject:
    """Any other object. ``where``: names it in warnings."""

    def __init__(self, node: Stateful, where: str) -> None:
        self._node, self._where = node, where
        self._template = _ReturnedTree(dict if is_loader(node) else node.state_dict)  # of a loader, it would start workers

    def saved(self) -> object:
        return self._node.state_dict()

    def into(self, mark: Mark) -> object:
        return mark(self._template)

    def load(self, restored: State) -> object:
        if is_loader(self._node) and _is_in_use(self._node):
            logger.warning("an iterator of %s was made before the restore, and does not follow it: make a new one", self._where)
        load_object(self._node, cast(State, replace(self._template.tree, {(): restored})))
        return None


class _ReturnedTree(Template):
    """What an object returns. Tensors that share memory there, as learning rates in ``SequentialLR`` do, are not filled in place:
    the version may have other elements for each."""

    @functools.cached_property
    def _shared(self) -> set[int]:
        counts = Counter(map(_address, tensors_in(self.tree)))
        return {address for address, count in counts.items() if address and count > 1}

    def memory(self, path: Path, dtype: str, shape: tuple[int, ...]) -> Elements | None:
        own = super().memory(path, dtype, shape)
        return own if own is None or _address(own) not in self._shared else None


class RankValue:
    """A value, tensor or container without objects, which each rank has for itself."""

    def __init__(self, node: object) -> None:
        self._node, self._template = node, Template(functools.partial(_same, node))

    def saved(self) -> object:
        return self._node

    def into(self, mark: Mark) -> object:
        return mark(self._template)

    def load(self, restored: State) -> object:
        return replace(self._node, {(): restored})


def is_loader(node: object) -> bool:
    """Whether an object is a data loader of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(node, torch.utils.data.DataLoader)


def load_object(node: Stateful, state: State) -> None:
    """Load an object. The iterator of a data loader is made here, before generators are set: it draws seeds, and the one that was
    saved has drawn them already."""
    node.load_state_dict(state)
    if is_loader(node):
        node.state_dict()  # makes the iterator that the next iter() returns


def _is_in_use(loader: Any) -> bool:
    """Whether an iterator of a data loader was returned."""
    return getattr(loader, "_iterator", None) is not None and not getattr(loader, "_initial_iter_for_state_dict", False)


def _address(node: Elements | None) -> int:
    """Where the memory of a tensor or array begins; 0 for one without, and for tensors of other classes."""
    if isinstance(node, np.ndarray):
        return int(node.__array_interface__["data"][0])
    torch = sys.modules.get("torch")
    if node is None or torch is None or type(node) is not torch.Tensor or node.layout is not torch.strided:
        return 0
    return int(node.untyped_storage().data_ptr())


def _same(node: object) -> object:
    return node
