"""``PerRank``: a part of a state of which each rank has its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..storage.errors import StateError
from ..storage.format.rank_parts import rank_part
from .box import Box, Boxes
from .dtensor_layout import is_dtensor
from .tree import Path, is_tensor, show


class PerRank:
    """Store ``value`` for each rank, and restore it to the same rank: plain values, objects, tensors and arrays below it.

    A restore on another number of ranks gives to new ranks what was equal on all ranks. An object that defines
    ``load_rank_states(states, rank, world_size)`` gets the states of all ranks that saved, in order, instead of
    ``load_state_dict``. A warning names all else, which ``Version.per_rank`` returns.

    Args:
        value: An object with ``state_dict`` and ``load_state_dict``, or what a state may contain, but no DTensors.

    Attributes:
        value: The same; after a restore, what was saved.

    Example:
        >>> state = {"model": model, "loader": raystow.PerRank(loader)}
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


@dataclass(frozen=True)
class RankStates:
    """The states of all ranks that saved a version, for an object that merges them."""

    states: tuple[object, ...]


def rank_form(node: object, rank: int, path: Path, what: str) -> object:
    """``node`` with a box of this rank alone in place of each tensor. Containers are copied."""
    if is_tensor(node):
        if is_dtensor(node) or isinstance(node, Box | Boxes):
            sort = f"a {type(node).__name__}, of which each rank has its own part in any case, is below raystow.PerRank"
            raise StateError(sort, subject=show(path, what), remedy="put it outside of it")
        shape = tuple(node.shape)  # type: ignore[attr-defined]
        return {rank_part(rank): Box(node, shape, (0,) * len(shape), (rank,))}
    if isinstance(node, dict):
        return {key: rank_form(child, rank, (*path, key), what) for key, child in node.items()}
    if isinstance(node, list):
        return [rank_form(child, rank, (*path, ("list", i)), what) for i, child in enumerate(node)]
    if isinstance(node, tuple):
        return tuple(rank_form(child, rank, (*path, ("tuple", i)), what) for i, child in enumerate(node))
    return node
