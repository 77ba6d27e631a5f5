"""``ObjectMarker``: the place of an object in the tree to restore into, which takes what was saved there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeGuard

import numpy as np

from .as_saved import AsSaved
from .box import Box, Boxes
from .dtensor_layout import is_dtensor
from .lossy.tensor_values import dtype_name
from .per_rank import RankStates
from .shards import overlaps
from .tree import Elements, Path, is_tensor, part_of

if TYPE_CHECKING:
    import torch


class MarkerTarget(Protocol):
    """What a marker asks: see ``AsSaved``."""

    def takes(self, path: Path) -> bool: ...

    def memory(self, path: Path, dtype: str, shape: tuple[int, ...]) -> Elements | None: ...

    def device(self, path: Path) -> str | torch.device: ...

    def like(self) -> Mapping[str, Elements]: ...

    def check(self, whole: object) -> None: ...


Mark = Callable[[MarkerTarget], AsSaved]
"""Makes the marker of an object."""


@dataclass(frozen=True, eq=False)
class ObjectMarker(AsSaved):
    """Stands for an object of ``into``. ``per_rank``: each rank has its own. ``merges``: with another number of ranks it takes
    the state of each, as ``RankStates``."""

    target: MarkerTarget = field(kw_only=True)
    per_rank: bool = field(default=False, kw_only=True)
    merges: bool = field(default=False, kw_only=True)

    def _takes(self, path: Path) -> bool:
        return self.target.takes(path)

    def _memory(self, path: Path, dtype: str, shape: tuple[int, ...]) -> Elements | None:
        return self.target.memory(path, dtype, shape)

    def _device(self, path: Path) -> str | torch.device:
        return self.target.device(path)

    def _like(self) -> Mapping[str, Elements]:
        return self.target.like()

    def _check(self, whole: object) -> None:
        if not isinstance(whole, RankStates):
            self.target.check(whole)


class Template:
    """What an object has now: its tensors and arrays are filled where the same was saved. ``make``: returns it, and is called
    when there is a version to restore. ``check``: see ``AsSaved``."""

    def __init__(self, make: Callable[[], object], check: Callable[[object], None] = lambda whole: None) -> None:
        self._make, self.check = make, check

    @functools.cached_property
    def tree(self) -> object:
        return self._make()

    def takes(self, path: Path) -> bool:
        return True

    def memory(self, path: Path, dtype: str, shape: tuple[int, ...]) -> Elements | None:
        own = part_of(self.tree, path)
        if is_dtensor(own) or isinstance(own, Box | Boxes):
            return own
        if isinstance(own, np.ndarray):
            fits = own.flags.writeable and str(own.dtype) == dtype and own.shape == shape
        else:
            fits = _is_torch(own) and not own.is_meta and (dtype_name(own.dtype), tuple(own.shape)) == (dtype, shape)
        return own if fits and not overlaps(own) else None

    def device(self, path: Path) -> str | torch.device:
        own = part_of(self.tree, path)
        if isinstance(own, AsSaved):
            return own.device
        found = _first_device(own if is_tensor(own) else self.tree)
        return "cpu" if found is None or found.type == "meta" else found

    def like(self) -> Mapping[str, Elements]:
        return {}


def tensors_in(node: object) -> Iterator[Elements]:
    """The tensors and arrays in nested containers."""
    if is_tensor(node):
        yield node
        return
    children: Iterable[object] = node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()
    for child in children:
        yield from tensors_in(child)


def _is_torch(node: object) -> TypeGuard[torch.Tensor]:
    return is_tensor(node) and hasattr(node, "is_meta")


def _first_device(node: object) -> torch.device | None:
    return next((one.device for one in tensors_in(node) if _is_torch(one)), None)
