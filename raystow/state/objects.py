"""Objects in a state that have ``state_dict`` and ``load_state_dict``: what is saved of them, and how they are restored.

A state with objects becomes a tree without: to save, one of their state dicts; to restore, one of the tensors of modules, which
are filled in place, and of markers, which take what was saved. Objects are loaded after all has been read and checked: modules
and optimizers, then others, random generators last.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..storage.errors import StateError
from ..storage.format import values
from .as_saved import AsSaved
from .box import Box, Boxes
from .dtensor_layout import is_dtensor
from .lossy.tensor_values import dtype_name
from .modules import ModuleState
from .optimizers import OptimizerState, parameter_names
from .per_rank import PerRank, RankStates, rank_form
from .rng import Rng
from .shards import overlaps
from .tree import Elements, Path, Placeholder, is_tensor, part_of, replace, show

if TYPE_CHECKING:
    import torch

_DEEPEST = 100
_RANK_PART = re.compile(r'\["\[rank \d+\]"\]$')


class StateObject(Protocol):
    """An object of a state, or a value that each rank has for itself."""

    def saved(self) -> object:
        """What is saved of it."""

    def into(self, mark: Callable[[AnyTarget], AsSaved]) -> object:
        """What stands for it in the tree to restore into."""

    def load(self, restored: Any) -> object:
        """Load what a restore has put there, and return what takes its place in the state."""


class AnyTarget(Protocol):
    """What a marker asks: see ``AsSaved``."""

    def takes(self, path: Path) -> bool: ...

    def memory(self, path: Path, dtype: str, shape: tuple[int, ...]) -> Elements | None: ...

    def device(self, path: Path) -> str | torch.device: ...

    def check(self, whole: object) -> None: ...


@dataclass(frozen=True, eq=False)
class ObjectMarker(AsSaved):
    """Stands for an object of ``into``. ``per_rank``: each rank has its own. ``merges``: with another number of ranks it takes
    the state of each, as ``RankStates``."""

    target: AnyTarget = field(kw_only=True)
    per_rank: bool = field(default=False, kw_only=True)
    merges: bool = field(default=False, kw_only=True)

    def _takes(self, path: Path) -> bool:
        return self.target.takes(path)

    def _memory(self, path: Path, dtype: str, shape: tuple[int, ...]) -> Elements | None:
        return self.target.memory(path, dtype, shape)

    def _device(self, path: Path) -> str | torch.device:
        return self.target.device(path)

    def _check(self, whole: object) -> None:
        if not isinstance(whole, RankStates):
            self.target.check(whole)


class ObjectTree:
    """A state whose objects were replaced. ``what``: names the state in errors.

    Attributes:
        tree: The state without objects; the state itself if it has none.
    """

    def __init__(self, state: object, *, what: str) -> None:
        self._state, self._what = state, what
        self._found = _found(state, what)
        self._tensors: dict[Path, StateObject] = {}
        self.tree: Any = state

    def saved(self, rank: int, *, tensors_only: bool = False) -> Any:
        """The tree to save. ``tensors_only``: of modules and optimizers alone."""
        if not self._found:
            return self._state
        with self.named():
            forms: dict[Path, object] = {}
            for path, (node, per_rank, one) in self._objects().items():
                if tensors_only and not isinstance(one, _Module | _Optimizer):
                    forms[path] = {}
                    continue
                form = one.saved()
                forms[path] = rank_form(form, rank, path, self._what) if per_rank else form
            return _built(self._state, forms, _around(forms), ())

    def into(self) -> Any:
        """The tree to restore into."""
        if not self._found:
            return self._state
        with self.named():
            forms: dict[Path, object] = {}
            for path, (node, per_rank, one) in self._objects().items():
                merges = per_rank and hasattr(node, "load_rank_states")
                mark = functools.partial(_mark, per_rank=per_rank, merges=merges)
                forms[path] = mark(_Template(one.saved)) if per_rank and isinstance(one, _Module) else one.into(mark)
            self.tree = _built(self._state, forms, _around(forms), ())
            return self.tree

    def load(self, rank: int, world_size: int) -> None:
        """Load each object from the restored tree, and give the state what was restored in other places."""
        if not self._found:
            return
        new = dict[Path, object]()
        for path, (node, _, one) in self._objects().items():
            restored = part_of(self.tree, path)
            if isinstance(restored, Placeholder):
                continue  # nothing was saved for this rank, or it may be missing
            if isinstance(restored, RankStates):
                node.load_rank_states(list(restored.states), rank, world_size)  # type: ignore[attr-defined]
                continue
            new[path] = one.load(restored)
        _settled(self._state, self.tree, new, ())

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Name the objects in the paths of errors: ``state["sched"].state_dict()["lr_lambdas"][0]``."""
        try:
            yield
        except StateError as error:
            subject = _RANK_PART.sub("", error.subject)
            for path, (node, _) in self._found.items():
                where = show(path, self._what)
                inside = subject.startswith(f"{where}[") or (subject == where and isinstance(self._tensors.get(path), _Plain))
                if _is_object(node) and inside:
                    subject = f"{where}.state_dict(){subject.removeprefix(where)}"
            if subject == error.subject:
                raise
            remedy = f"let state_dict() {error.remedy}" if error.remedy.startswith("leave it out") else error.remedy
            raise type(error)(error.what, subject=subject, remedy=remedy) from error

    def _objects(self) -> dict[Path, tuple[object, bool, StateObject]]:
        """What is known of each object, in the order in which they are saved and loaded."""
        if self._tensors:
            return {path: (*self._found[path], one) for path, one in self._tensors.items()}
        torch, found = sys.modules.get("torch"), self._found
        modules, optimizers, generators = dict[Path, StateObject](), dict[Path, Any](), dict[Path, StateObject]()
        others, models = dict[Path, StateObject](), dict[str, _Module]()
        for path, (node, _) in found.items():
            if torch is not None and isinstance(node, torch.nn.Module):
                modules[path] = module = _Module(node)
                models[".".join(str(part[1]) if isinstance(part, tuple) else str(part) for part in path)] = module
            elif torch is not None and isinstance(node, torch.optim.Optimizer):
                optimizers[path] = node
            elif isinstance(node, Rng):
                generators[path] = _Plain(node)
            else:
                others[path] = _Plain(node) if _is_object(node) else _Value(node)
        if optimizers:
            named = {name: module.state.names() for name, module in models.items()}
            for path, node in optimizers.items():
                where = show(path, self._what)
                optimizers[path] = _Optimizer(OptimizerState(node, parameter_names(node, named, where), where))
        self._tensors = {**modules, **optimizers, **others, **generators}
        return {path: (*found[path], one) for path, one in self._tensors.items()}


def _mark(target: AnyTarget, *, per_rank: bool, merges: bool) -> ObjectMarker:
    return ObjectMarker(target=target, per_rank=per_rank, merges=merges)


class _Module:
    def __init__(self, module: torch.nn.Module) -> None:
        self.state = ModuleState(module)

    def saved(self) -> object:
        return self.state.saved()

    def into(self, mark: Callable[[AnyTarget], AsSaved]) -> object:
        own = self.state.own
        return {
            name: value if name in own else mark(_Template(functools.partial(_same, value)))
            for name, value in self.state.tree.items()
        }

    def load(self, restored: Any) -> object:
        tree = {name: self.state.tree[name] if isinstance(value, Placeholder) else value for name, value in restored.items()}
        self.state.load(tree)
        return None


class _Optimizer:
    def __init__(self, state: OptimizerState) -> None:
        self.state = state

    def saved(self) -> object:
        return self.state.saved()

    def into(self, mark: Callable[[AnyTarget], AsSaved]) -> object:
        return mark(self.state)

    def load(self, restored: Any) -> object:
        self.state.load(restored)
        return None


class _Plain:
    """Any other object."""

    def __init__(self, node: Any) -> None:
        self._node, self._template = node, _Template(node.state_dict)

    def saved(self) -> object:
        return self._node.state_dict()

    def into(self, mark: Callable[[AnyTarget], AsSaved]) -> object:
        return mark(self._template)

    def load(self, restored: Any) -> object:
        self._node.load_state_dict(replace(self._template.tree, {(): restored}))
        return None


class _Value:
    """A value, tensor or container without objects, which each rank has for itself."""

    def __init__(self, node: object) -> None:
        self._node, self._template = node, _Template(functools.partial(_same, node))

    def saved(self) -> object:
        return self._node

    def into(self, mark: Callable[[AnyTarget], AsSaved]) -> object:
        return mark(self._template)

    def load(self, restored: Any) -> object:
        return replace(self._node, {(): restored})


class _Template:
    """What an object has now: its tensors and arrays are filled where the same was saved. ``make``: returns it, and is called
    when there is a version to restore."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._make = make

    @functools.cached_property
    def tree(self) -> object:
        return self._make()

    def takes(self, path: Path) -> bool:
        return True

    def memory(self, path: Path, dtype: str, shape: tuple[int, ...]) -> Elements | None:
        own: Any = part_of(self.tree, path)
        if is_dtensor(own) or isinstance(own, Box | Boxes):
            return own
        if isinstance(own, np.ndarray):
            fits = own.flags.writeable and str(own.dtype) == dtype and own.shape == shape
        else:
            fits = is_tensor(own) and not isinstance(own, np.generic) and not own.is_meta
            fits = fits and (dtype_name(own.dtype), tuple(own.shape)) == (dtype, shape)
        return own if fits and not overlaps(own) else None

    def device(self, path: Path) -> str | torch.device:
        own: Any = part_of(self.tree, path)
        if isinstance(own, AsSaved):
            return own.device
        found = _first_device(own if is_tensor(own) else self.tree)
        return "cpu" if found is None or found.type == "meta" else found

    def check(self, whole: object) -> None:
        pass


def _same(node: object) -> object:
    return node


def _first_device(node: object) -> torch.device | None:
    if is_tensor(node):
        return getattr(node, "device", None) if hasattr(node, "is_meta") else None
    children: Iterable[object] = node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()
    return next((device for child in children if (device := _first_device(child)) is not None), None)


def _found(state: object, what: str) -> dict[Path, tuple[object, bool]]:
    """The objects of a state by path, and the values right below ``PerRank`` that have none in them; and whether each rank has
    its own. ``StateError`` for one that is in two places."""
    found = dict[Path, tuple[object, bool]]()
    _find(state, (), found, per_rank=False, depth=0)
    first = dict[int, Path]()
    for path, (node, _) in found.items():
        if _is_object(node) and first.setdefault(id(node), path) != path:
            there = f"is the object {show(first[id(node)], what)}, too"
            raise StateError(there, subject=show(path, what), remedy="name each object once")
    return found


def _find(node: object, path: Path, found: dict[Path, tuple[object, bool]], *, per_rank: bool, depth: int) -> None:
    if isinstance(node, PerRank):
        node, per_rank = node.value, True
    if _is_object(node):
        found[path] = node, per_rank or isinstance(node, Rng)
    elif per_rank and not _has_objects(node, depth):
        found[path] = node, True
    elif depth <= _DEEPEST and _may_have(node):
        for part, child in _parts(node):
            if per_rank or not _is_leaf(type(child)):
                _find(child, (*path, part), found, per_rank=per_rank, depth=depth + 1)


def _has_objects(node: object, depth: int) -> bool:
    if _is_object(node) or isinstance(node, PerRank):
        return True
    return depth <= _DEEPEST and _may_have(node) and any(_has_objects(child, depth + 1) for _, child in _parts(node))


def _may_have(node: object) -> bool:
    """Whether a node is a container of more than leaves. The training waits for this: there may be 50,000."""
    if not isinstance(node, dict | list | tuple):
        return False
    kinds: set[type] = set(map(type, node.values() if isinstance(node, dict) else node))
    return not all(map(_is_leaf, kinds))


def _parts(node: Any) -> Iterable[tuple[Any, object]]:
    if isinstance(node, dict):
        return node.items()
    kind = "list" if isinstance(node, list) else "tuple"
    return [((kind, i), child) for i, child in enumerate(node)]


_leaves: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def _is_leaf(kind: type) -> bool:
    """Whether values of a class are neither containers nor objects."""
    found = _leaves.get(kind)
    if found is None:
        torch = sys.modules.get("torch")
        found = kind in values.PLAIN or issubclass(kind, np.ndarray | np.generic | Box | Boxes | Placeholder)
        found = _leaves[kind] = found or (torch is not None and issubclass(kind, torch.Tensor))
    return found


def _is_object(node: Any) -> bool:
    if _is_leaf(type(node)) or isinstance(node, dict | list | tuple | type | PerRank):
        return False
    return callable(getattr(node, "state_dict", None)) and callable(getattr(node, "load_state_dict", None))


def _around(forms: Iterable[Path]) -> set[Path]:
    """The paths of the containers around those of ``forms``."""
    return {path[:depth] for path in forms for depth in range(len(path))}


def _built(node: object, forms: Mapping[Path, object], around: set[Path], path: Path) -> Any:
    """``node`` with forms in the places of objects; the containers ``around`` them are copied."""
    if path in forms:
        return forms[path]
    if isinstance(node, PerRank):
        node = node.value
    if path not in around:
        return node
    children = [(part, _built(child, forms, around, (*path, part))) for part, child in _parts(node)]
    if isinstance(node, dict):
        return dict(children)
    items = [child for _, child in children]
    return items if isinstance(node, list) else tuple(items)


def _settled(node: Any, restored: Any, new: Mapping[Path, object], path: Path) -> object:
    """``node`` with what was restored in its containers; ``new``: what takes the place of values below ``PerRank``."""
    if isinstance(node, PerRank):
        node.value = _settled(node.value, restored, new, path)
        return node
    if restored is node or _is_object(node):
        return node
    if path in new:
        return new[path]
    if not isinstance(node, dict | list | tuple) or isinstance(restored, Placeholder):
        return node if isinstance(restored, Placeholder) else restored
    if not isinstance(restored, dict | list | tuple) or len(restored) != len(node):
        return restored
    items = {part: _settled(child, part_of(restored, (part,)), new, (*path, part)) for part, child in _parts(node)}
    return replace(node, {(part,): item for part, item in items.items() if item is not part_of(node, (part,))})
