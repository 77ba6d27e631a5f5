"""Objects in a state that have ``state_dict`` and ``load_state_dict``.

A state with objects becomes a tree without: to save, one of their state dicts; to restore, one of the tensors of modules, which
are filled in place, and of markers, which take what was saved. Objects are loaded after all has been read and checked: modules
and optimizers, then others, random generators last.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from ..storage.errors import StateError
from ..storage.format.manifest import path_text
from ..storage.versions.value_tree import part_text
from .object_marker import MarkerTarget, ObjectMarker
from .object_places import ObjectPlace, built, is_object, places, settled, tensor_names
from .optimizers import OptimizerState, parameter_names, parameters_of
from .per_rank import RankStates, rank_form
from .rng import Rng
from .state_object import ModuleObject, OtherObject, RankValue, Stateful, StateObject
from .tree import BY_METHODS, Path, Placeholder, State, part_of, show

if TYPE_CHECKING:
    import torch

_RANK_PART = re.compile(r'\["\[rank \d+\]"\]$')


class ObjectTree:
    """A state whose objects were replaced. ``what``: names the state in errors.

    Attributes:
        tree: The state without objects; the state itself if it has none.
    """

    def __init__(self, state: object, *, what: str) -> None:
        self._state, self._what = state, what
        self._places = places(state, what)
        self._made: dict[Path, StateObject] = {}
        self.tree = cast(State, state)

    def saved(self, rank: int, *, tensors_only: bool = False) -> object:
        """The tree to save. ``tensors_only``: of modules and optimizers alone."""
        if not self._places:
            return self._state
        with self.named():
            forms = dict[Path, object]()
            for path, one in self._objects().items():
                if tensors_only and not isinstance(one, ModuleObject | OptimizerState):
                    forms[path] = {}
                    continue
                form = one.saved()
                forms[path] = rank_form(form, rank, path, self._what) if self._places[path].per_rank else form
            return built(self._state, forms)

    def own_paths(self) -> list[str]:
        """The paths, as stored, below which each rank has its own values."""
        return [path_text(path) for path, place in self._places.items() if place.per_rank]

    def buffers(self) -> frozenset[str]:
        """The names under which tensors of modules that are no parameters are saved."""
        around = {path: ".".join(map(part_text, path)) for path in self._made}
        modules = [(around[path], one) for path, one in self._made.items() if isinstance(one, ModuleObject)]
        return frozenset(f"{name}.{buffer}" for name, one in modules for buffer in one.state.changing)

    def into(self) -> State:
        """The tree to restore into."""
        if self._places:
            with self.named():
                forms = {path: one.into(functools.partial(_mark, self._places[path])) for path, one in self._objects().items()}
            self.tree = cast(State, built(self._state, forms))
        return self.tree

    def load(self, rank: int, world_size: int) -> None:
        """Load each object from the restored tree, and give the state what was restored in other places.

        ``StateError`` if an object raises, which may be half loaded then: it names it, and those that are loaded already.
        """
        if not self._places:
            return
        new = dict[Path, object]()
        for path, one in self._objects().items():
            restored = part_of(self.tree, path)
            try:
                if isinstance(restored, RankStates):
                    node: Any = self._places[path].node
                    node.load_rank_states(list(restored.states), rank, world_size)
                elif not isinstance(restored, Placeholder):  # else nothing was saved for this rank, or it may be missing
                    new[path] = one.load(cast(State, restored))
            except Exception as error:  # of any class of the user
                raise self._half_loaded(path, error) from error
        settled(self._state, self.tree, new)

    def _half_loaded(self, path: Path, error: Exception) -> StateError:
        """The error of an object that could not be loaded. What was loaded before cannot be undone: tensors of modules and of
        optimizers are filled where they are, and to ask each object for its state first may start its workers."""
        objects = [one for one in self._objects() if is_object(self._places[one].node)]
        at = objects.index(path) if path in objects else len(objects)
        parts = [("loaded", objects[:at]), ("not loaded", objects[at + 1 :])]
        said = "; ".join(f"{which}: {', '.join(show(one, self._what) for one in ones)}" for which, ones in parts if ones)
        raised = f"could not be loaded: {type(error).__name__}: {error}"
        remedy = "end this process: its state is of two times"
        return StateError(f"{raised}; {said}" if said else raised, subject=show(path, self._what), remedy=remedy)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Name the objects in the paths of errors: ``state["sched"].state_dict()["lr_lambdas"][0]``."""
        try:
            yield
        except StateError as error:
            subject = _RANK_PART.sub("", error.subject)
            for path, place in self._places.items():
                where = show(path, self._what)
                inside = subject.startswith(f"{where}[") or (subject == where and isinstance(self._made.get(path), OtherObject))
                if is_object(place.node) and inside:
                    subject = f"{where}.state_dict(){subject.removeprefix(where)}"
            if subject == error.subject:
                raise
            remedy = f"let state_dict() {error.remedy}" if error.remedy.startswith("leave it out") else error.remedy
            remedy = remedy.replace(BY_METHODS, "return its own state_dict()")
            raise type(error)(error.what, subject=subject, remedy=remedy) from error

    def _objects(self) -> dict[Path, StateObject]:
        """The objects in the order in which they are saved and loaded."""
        if not self._made:
            loaded = sys.modules.get("torch")
            modules, optimizers = dict[Path, ModuleObject](), dict[Path, "torch.optim.Optimizer"]()
            others, generators = dict[Path, StateObject](), dict[Path, StateObject]()
            for path, (node, per_rank) in self._places.items():
                where = show(path, self._what)
                if loaded is not None and isinstance(node, loaded.nn.Module):
                    modules[path] = ModuleObject(node, where, per_rank=per_rank)
                elif loaded is not None and isinstance(node, loaded.optim.Optimizer):
                    optimizers[path] = node
                elif isinstance(node, Rng):
                    generators[path] = OtherObject(node, where)
                else:
                    others[path] = OtherObject(cast(Stateful, node), where) if is_object(node) else RankValue(node)
            self._made = {**modules, **self._optimizers(modules, optimizers), **others, **generators}
        return self._made

    def _optimizers(
        self, modules: Mapping[Path, ModuleObject], optimizers: Mapping[Path, torch.optim.Optimizer]
    ) -> dict[Path, StateObject]:
        """The optimizers, with the names that their parameters have in the modules."""
        if not optimizers:
            return {}
        names = {".".join(map(part_text, path)): module.state.names() for path, module in modules.items()}
        known, found = set[int]().union(*names.values()), dict[Path, StateObject]()
        if any(id(parameter) not in known for optimizer in optimizers.values() for parameter in parameters_of(optimizer)):
            names[""] = tensor_names(self._state)
        for path, optimizer in optimizers.items():
            where = show(path, self._what)
            found[path] = OptimizerState(optimizer, parameter_names(optimizer, names, where), where)
        return found


def _mark(place: ObjectPlace, target: MarkerTarget) -> ObjectMarker:
    merges = place.per_rank and hasattr(place.node, "load_rank_states")
    return ObjectMarker(target=target, per_rank=place.per_rank, merges=merges)
