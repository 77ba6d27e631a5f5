"""Finds the rank and world size of this process: from the caller, Ray Train, torch.distributed, the environment or Slurm."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from ...storage.arguments import integer
from ...storage.errors import StateError


class Placement(NamedTuple):
    """The rank of a process, from 0, and the number of ranks."""

    rank: int
    world_size: int


def placement(rank: int | None = None, world_size: int | None = None) -> Placement:
    """Return the rank and world size of this process; 0 and 1 if nothing tells them.

    Raises ``StateError`` if only one of the two is given, or if any two of the sources contradict each other: ranks that are
    wrong make ranks overwrite each other's shards. Arguments that are those of torch.distributed are right, whatever the others
    tell: a replica group of torchft is a world of its own, and Ray Train counts the ranks of all groups.
    """
    if (rank is None) != (world_size is None):
        given, missing = ("world_size", "rank") if rank is None else ("rank", "world_size")
        raise StateError(f"{given}= is given without {missing}=", remedy="pass both, or neither")
    found = {"Ray Train": train_worker(), "torch.distributed": process_group(), "RANK and WORLD_SIZE": _environment()}
    if rank is not None and world_size is not None:
        given_here = Placement(integer("rank", rank, least=0), integer("world_size", world_size, least=1))
        found = {"the arguments": given_here, **found}
    known = {source: place for source, place in found.items() if place is not None}
    for source, (rank, world_size) in known.items():
        if not 0 <= rank < world_size:
            raise StateError(f"{source}: rank {rank} in a world of {world_size}", remedy="ranks count from 0")
    if (passed := known.get("the arguments")) is not None and passed == known.get("torch.distributed"):
        return passed
    if len(set(known.values())) > 1:
        sources = "; ".join(f"{source}: {_text(place)}" for source, place in found.items())
        remedy = "pass the rank and world size that Ray Train or torch.distributed has, or unset RANK and WORLD_SIZE"
        raise StateError(f"contradictory ranks ({sources})", remedy=remedy)
    return next(iter(known.values()), None) or _slurm() or Placement(0, 1)


def process_group() -> Placement | None:
    """Return what torch.distributed has, if it is initialized."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return Placement(int(distributed.get_rank()), int(distributed.get_world_size()))


def _text(place: Placement | None) -> str:
    return "none" if place is None else f"rank {place.rank} of {place.world_size}"


def train_worker() -> Placement | None:
    """Return what Ray Train tells its worker; None in any other process."""
    train = sys.modules.get("ray.train")
    if train is None:
        return None
    try:
        context = train.get_context()
        return Placement(int(context.get_world_rank()), int(context.get_world_size()))
    except (RuntimeError, AttributeError):
        return None  # not in a Ray Train worker


def _slurm() -> Placement | None:
    """What srun tells each task of a step: used if nothing else tells the rank. Workers of a Ray cluster that srun has started
    inherit it, but are no such tasks."""
    ray = sys.modules.get("ray")
    if ray is not None and ray._private.worker.global_worker.mode == ray.WORKER_MODE:
        return None
    texts = [os.environ.get(name) for name in ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")]
    return None if None in texts else Placement(*(int(text or "") for text in texts[1:]))


def _environment() -> Placement | None:
    """What torchrun and Ray Train set."""
    texts = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if None in texts:
        return None
    try:
        return Placement(*(int(text or "") for text in texts))
    except ValueError:
        raise StateError(f"RANK={texts[0]!r} and WORLD_SIZE={texts[1]!r} are no numbers", remedy="set or unset both") from None
