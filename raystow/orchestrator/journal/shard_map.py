"""Which elements of this rank's parameters other ranks had when they recorded a step.

Optimizers that act element by element give the same values however parameters are split, so that the gradients that N ranks have
recorded serve M ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop

from ...storage.errors import StateError
from ...storage.format.boxes import Box, overlap, within
from .tracked_state import TrackedState

_ELEMENTWISE = {ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop}


class ShardPiece(NamedTuple):
    """The elements ``common`` of a parameter that this rank has and ``rank`` had. ``box``: all that it had of the parameter."""

    rank: int
    box: Box
    common: Box


class ShardMap:
    """Finds the pieces of this rank's parts of all parameters.

    Args:
        mine: This rank's part of each parameter.
        theirs: The same for ranks that have recorded a step; of those that had the same part, the lowest is used.
    """

    def __init__(self, mine: Sequence[Box], theirs: Mapping[int, Sequence[Box]]) -> None:
        self.mine = mine
        self.pieces: list[list[ShardPiece]] = [[] for _ in mine]
        """The pieces of each parameter."""
        for number, box in enumerate(mine):
            known = set[Box]()
            for rank in sorted(theirs):
                other = theirs[rank][number]
                common = overlap(box, other) if len(box[0]) == len(other[0]) else None
                if common is not None and other not in known:
                    known.add(other)
                    self.pieces[number].append(ShardPiece(rank, other, common))

    @property
    def complete(self) -> bool:
        """Whether the pieces are all elements of this rank's parts, each once."""
        covered = (sum(math.prod(piece.common[1]) for piece in pieces) for pieces in self.pieces)
        return all(math.prod(box[1]) == found for box, found in zip(self.mine, covered, strict=True))

    def ranks(self) -> set[int]:
        """The ranks whose entries are needed."""
        return {piece.rank for pieces in self.pieces for piece in pieces}

    def assembled(self, number: int, parts: Mapping[int, torch.Tensor | None]) -> torch.Tensor | None:
        """The gradient of this rank's part of a parameter, from the recorded ones by rank; None if there was none.

        Raises ``StateError`` unless they have the shapes of the ranks' parts.
        """
        found = [parts[piece.rank] for piece in self.pieces[number]] or [next(iter(parts.values()))]
        if all(part is None for part in found):
            return None
        dtype = next(part.dtype for part in found if part is not None)
        whole = torch.zeros(self.mine[number][1], dtype=dtype)
        for piece in self.pieces[number]:
            part = parts[piece.rank]
            if part is None or part.dtype != dtype or tuple(part.shape) != piece.box[1]:
                raise StateError(
                    f"the gradient of parameter {number} that rank {piece.rank} has recorded is not that of its part"
                )
            whole[within(piece.common, self.mine[number])] = part[within(piece.common, piece.box)]
        return whole


def layout(state: TrackedState) -> tuple[Box, ...]:
    """This rank's part of each parameter; empty if one is not a box."""
    try:
        return tuple(_box(parameter) for parameter in state.all_parameters())
    except StateError:
        return ()


def copy_numbers(state: TrackedState) -> list[tuple[int, ...]]:
    """For each parameter, which of the copies of its part this rank has: its places along the mesh dimensions that replicate."""
    return [_copy_number(parameter) for parameter in state.all_parameters()]


def fixed_ranks(state: TrackedState) -> str:
    """Why steps that another number of ranks has recorded cannot be replayed; empty if they can."""
    for optimizer in state.optimizers:
        if type(optimizer) not in _ELEMENTWISE:
            return f"{type(optimizer).__name__} is not known to act element by element"
    return "" if layout(state) or not state.all_parameters() else "this rank's part of a parameter is not one box"


def _box(parameter: torch.Tensor) -> Box:
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return (0,) * parameter.dim(), tuple(parameter.shape)
    from ...state.dtensor_layout import dtensor_shard

    with torch.no_grad():
        return dtensor_shard(parameter, "a parameter")[0]


def _copy_number(parameter: torch.Tensor) -> tuple[int, ...]:
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return ()
    here = parameter.device_mesh.get_coordinate() or ()
    return tuple(at for at, placement in zip(here, parameter.placements, strict=True) if placement.is_replicate())
