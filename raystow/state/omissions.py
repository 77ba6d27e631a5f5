"""What the first save of a training lacks although a restart needs it: found in a state before anything fails.

A finding is a sentence with its remedy. What is not known, such as the modules behind a plain dict of weights, is no finding.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ..storage.format.manifest import parse_path
from ..storage.versions.value_tree import part_text
from .modules import BY_DICTS
from .object_places import is_object, places
from .planner import SavePlan
from .rng import Rng
from .state_object import is_loader
from .tree import Elements, Path, show
from .wrapper_tensors import DESCRIPTION

if TYPE_CHECKING:
    import torch

_GROUPS, _EMPTY = "param_groups", '{"empty": "dict"}'
_SCHEDULES = ("sched", "last_epoch", "last_lr", "lr_lambda")
_GENERATORS = ("rng", "random", "generator", "mt19937")
"""Parts of names, in lower case, by which people and libraries call a schedule and random generators."""
_GENERATOR_SHAPES = ((16,), (5056,))
"""Shapes of what ``get_rng_state`` of torch returns, on a GPU and on a CPU."""
_STATEFUL = {"betas", "alpha", "rho", "etas", "lambd", "lr_decay", "beta2_decay", "history_size"}
"""Options of torch's optimizers that make state at each step."""
_COUNTERS = frozenset(
    ("step", "steps_done", "global_step", "current_step", "train_step", "iteration", "iter", "iter_num", "it", "batch_idx")
)
"""Names by which people count steps. Other numbers may stay the same: an epoch, or a configuration."""
_SHOWN = 3


@dataclass(frozen=True)
class SavedState:
    """A state of a rank, and the plan to save it.

    Attributes:
        values: The plain values, as JSON text, by name.
        objects: The objects in the state by the names under which they are saved.
    """

    state: object
    plan: SavePlan

    @cached_property
    def values(self) -> Mapping[str, str]:
        return {name: text for name, _, text in self.plan.values}

    @cached_property
    def objects(self) -> Mapping[str, object]:
        found = places(self.state, "state").items()
        return {".".join(map(part_text, path)): place.node for path, place in found if is_object(place.node)}

    @property
    def tensors(self) -> Iterator[tuple[str, Elements]]:
        return ((view.leaf.name, view.local) for view in self.plan.views)

    def own_values(self) -> dict[str, str]:
        """The values outside of objects, and of dicts that optimizers and learning rate schedulers have returned."""
        around = [*self.objects, *(name.removesuffix(".last_epoch") for name in self.values if name.endswith(".last_epoch"))]
        within = tuple(f"{name}." for name in around)
        return {
            name: text
            for name, text in self.values.items()
            if name not in self.objects and not name.startswith(within) and _GROUPS not in name.split(".")
        }

    def counters(self) -> list[str]:
        """The numbers among ``own_values`` that count steps, by their names."""
        own = {name: text for name, text in self.own_values().items() if name.rpartition(".")[2].lower() in _COUNTERS}
        return [name for name, text in own.items() if text.isdecimal()]

    def shown(self, names: Iterable[str]) -> str:
        """Values as Python writes their places: ``state["step"]``."""
        paths = {name: path for name, path, _ in self.plan.values}
        places = [show(_path(paths[name])) for name in names]
        return ", ".join(places[:_SHOWN]) + (f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else "")

    def mentions(self, words: Sequence[str]) -> bool:
        """Whether a name, or a text, has one of the words in it. Modules, optimizers and loaders have such names for other
        things."""
        loaders = [name for name, one in self.objects.items() if hasattr(one, "__iter__")]
        within = tuple(f"{name}." for name in (*self._modules, *self._optimizers, *loaders))
        values = {name: text for name, text in self.values.items() if not name.startswith(within) and _GROUPS not in name}
        texts = [text for text in values.values() if text.startswith('"')]
        names = [name for name, _ in self.tensors if not name.startswith(within)]
        return any(word in text for text in map(str.lower, (*names, *values, *texts)) for word in words)

    @cached_property
    def _modules(self) -> Mapping[str, torch.nn.Module]:
        torch = sys.modules.get("torch")
        return {name: one for name, one in self.objects.items() if torch is not None and isinstance(one, torch.nn.Module)}

    @cached_property
    def _optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        torch = sys.modules.get("torch")
        return {name: one for name, one in self.objects.items() if torch is not None and isinstance(one, torch.optim.Optimizer)}

    def omissions(self) -> Iterator[str]:
        """What is missing."""
        for name in self._optimizers_without_state():
            at = self._place(name)
            what = f"{at} is an optimizer without state: a restart begins its moments anew"
            yield f"{what}; save after its first step, and save the optimizer that makes the steps"
        names = (*self.values, *(name for name, _ in self.tensors))  # a learning rate may be a tensor
        scheduled = [name for name in names if name.endswith(".initial_lr") and _GROUPS in name.split(".")]
        if scheduled and not self._has_schedule():
            at = self._place(scheduled[0].partition(f"{_GROUPS}.")[0].rstrip("."))
            what = f"the parameter groups of {at} have initial_lr, but no learning rate scheduler is in the state"
            yield f"{what}: a restart begins its schedule anew; add the scheduler to the state"
        drawing = [name for name, module in self._modules.items() if any(map(_drops, module.modules()))]
        if drawing and not self._has_generators():
            what = f"{self._place(drawing[0])} has dropout, but no random generators are in the state"
            yield f'{what}: a restart draws other numbers; add "rng": raystow.Rng() to the state'
        for name in (
            name for name, one in self.objects.items() if getattr(one, "generator", None) is not None and is_loader(one)
        ):
            what = f"{self._place(name)} was made with generator=, which its state does not contain"
            yield f"{what}: a restart draws other epochs; leave generator= out, or give it to a sampler of its own"
        for name in (name for name in self.objects if name not in self._modules and self._consists_of_tensors(name)):
            what = f"{self._place(name)} has tensors that consist of others, as low-bit optimizers have"
            yield f"{what}: no object is restored from these; {BY_DICTS}"
        for name in self._metrics_left_out():
            what = f"{self._place(name)} has metrics that its state_dict() leaves out"
            yield f"{what}: a restart begins them anew; call persistent(True) on it"

    def _place(self, name: str) -> str:
        """The place of a container in the state, by its name."""
        for path in self._paths():
            for depth in range(len(path) + 1):
                if ".".join(map(part_text, path[:depth])) == name:
                    return show(path[:depth])
        return name

    def _paths(self) -> Iterator[Path]:
        yield from (_path(path) for _, path, _ in self.plan.values)
        yield from (view.leaf.path for view in self.plan.views)

    def _optimizers_without_state(self) -> Iterator[str]:
        for name, text in self.values.items():
            if text != _EMPTY or name.rpartition(".")[2] != "state":
                continue
            around = name.rpartition(".")[0]
            prefix = f"{around}.{_GROUPS}." if around else f"{_GROUPS}."
            options = {n.removeprefix(prefix).partition(".")[2]: t for n, t in self.values.items() if n.startswith(prefix)}
            if around in self._optimizers:
                stateful = _makes_state(self._optimizers[around])
            else:
                momentum = options.get("momentum", "0") not in ("0", "0.0")
                stateful = momentum or not _STATEFUL.isdisjoint(option.partition(".")[0] for option in options)
            if stateful:
                yield around

    def _consists_of_tensors(self, name: str) -> bool:
        return any(one.startswith(f"{name}.") and one.endswith(f".{DESCRIPTION}") for one in self.values)

    def _metrics_left_out(self) -> Iterator[str]:
        """Modules with metrics of torchmetrics that are not persistent, as they are by default."""
        kind = getattr(sys.modules.get("torchmetrics"), "Metric", ())
        for name, module in self._modules.items():
            metrics = [one for one in module.modules() if isinstance(one, kind)]
            if any(one.update_called and not all(one._persistent.values()) for one in metrics):
                yield name

    def _has_schedule(self) -> bool:
        others = [one for name, one in self.objects.items() if name not in self._modules and name not in self._optimizers]
        made_for_one = any(hasattr(one, "optimizer") or "sched" in type(one).__name__.lower() for one in others)
        return made_for_one or self.mentions(_SCHEDULES)

    def _has_generators(self) -> bool:
        if any(isinstance(one, Rng) for one in self.objects.values()) or self.mentions(_GENERATORS):
            return True
        shapes = [one.shape for _, one in self.tensors if str(one.dtype).endswith("uint8")]
        return any(tuple(shape) in _GENERATOR_SHAPES for shape in shapes)


def _path(text: str) -> Path:
    return tuple(parse_path(text))


def _makes_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of an optimizer makes state. No step is made for this: one of another class may do anything."""
    import torch

    groups = optimizer.param_groups
    if not any(parameter.requires_grad for group in groups for parameter in group["params"]):
        return False
    of_torch = [one for one in type(optimizer).__mro__ if one.__module__.startswith("torch.optim.")]
    if torch.optim.SGD in of_torch or of_torch[0] is torch.optim.Optimizer:
        momenta = [group["momentum"] for group in groups if "momentum" in group]
        if momenta and not any(momenta):
            return False
    return of_torch[0] is not torch.optim.Optimizer or _names_state(type(optimizer))


def _names_state(kind: type) -> bool:
    """Whether a method of a class, or of one between it and ``Optimizer``, has the word ``state`` in its code."""
    import torch

    own = kind.__mro__[: kind.__mro__.index(torch.optim.Optimizer)]
    members = [one.fget if isinstance(one, property) else one for each in own for one in vars(each).values()]
    return any("state" in inspect.unwrap(one).__code__.co_names for one in members if inspect.isfunction(one))


def _drops(module: torch.nn.Module) -> bool:
    """Whether a module sets random elements to zero now: a dropout, or a module with a rate of it, as attention has."""
    import torch

    if not module.training:
        return False
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return bool(module.p > 0)
    if isinstance(module, torch.nn.RNNBase) and module.num_layers == 1:
        return False
    return any("drop" in name and isinstance(rate, float) and rate > 0 for name, rate in vars(module).items())
