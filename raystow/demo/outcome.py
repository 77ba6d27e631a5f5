"""Compares the results of the two trainings, and measures the recovery."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..storage.coding import dtypes
from ..storage.repository import Repository
from ..storage.versions.reader import Request
from ..storage.versions.version import Version
from .events import Event, select
from .settings import DISTURBED, UNDISTURBED

Opaque = npt.NDArray[np.void]


@dataclass(frozen=True)
class Comparison:
    """The number of compared ``tensors``, the names of those that ``differ``, and the same for losses after the restore."""

    tensors: int
    differ: tuple[str, ...]
    losses: int
    losses_differ: int

    @property
    def same(self) -> bool:
        """Whether something was compared and nothing differs."""
        return self.tensors > 0 and self.losses > 0 and not self.differ and not self.losses_differ


def compare(undisturbed: Repository, disturbed: Repository, events: list[Event]) -> Comparison:
    """Compare the final versions bit for bit, and the losses of all steps after the restore."""
    ours, theirs = undisturbed.latest(), disturbed.latest()
    assert ours is not None
    assert theirs is not None
    first, second = _contents(ours), _contents(theirs)
    names = sorted(set(first) | set(second))
    differ = tuple(name for name in names if name not in first or name not in second or not _equal(first[name], second[name]))
    reference = {(e["rank"], e["step"]): e["loss"] for e in select(events, "step", run=UNDISTURBED)}
    restored = max(e["time"] for e in select(events, "restored"))
    again = [e for e in select(events, "step", run=DISTURBED) if e["time"] > restored]
    wrong = sum(reference.get((e["rank"], e["step"])) != e["loss"] for e in again)
    return Comparison(len(names), differ, len(again), wrong)


def _contents(version: Version) -> dict[str, Opaque]:
    """All tensors as opaque items, read in one pass."""
    targets = {name: np.empty(info.shape, f"V{dtypes.dtype(info.dtype).itemsize}") for name, info in version.tensors().items()}
    whole = {name: ((0,) * target.ndim, target.shape) for name, target in targets.items()}
    version.reader().fill(Request(name, version.chunks[name], whole[name], target) for name, target in targets.items())
    return targets


def _equal(first: Opaque, second: Opaque) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


@dataclass(frozen=True)
class Failure:
    """The failure: times in seconds after the kill. Steps after ``restored_step`` were replayed up to ``reached``; those after
    that up to ``step`` were lost."""

    step: int
    processes: int
    detected: float
    restored: float
    version: int
    restored_step: int
    reached: int
    durable: float


def failure(events: list[Event]) -> Failure:
    """Return the course of the failure from the events."""
    (killed,) = select(events, "killed")
    after = [e for e in events if e["time"] > killed["time"]]
    last = max(select(after, "restored"), key=lambda e: float(e["time"]))
    return Failure(
        step=killed["step"],
        processes=killed["processes"],
        detected=select(after, "detected")[0]["time"] - killed["time"],
        restored=last["time"] - killed["time"],
        version=last["version"],
        restored_step=last["step"],
        reached=last["reached"],
        durable=next(e["time"] for e in select(after, "durable") if e["time"] > last["time"]) - killed["time"],
    )


def stalls(events: list[Event], run: str) -> dict[int, float]:
    """Return the longest stall of a rank per version, in seconds, by version id."""
    longest: dict[int, float] = {}
    for e in select(events, "durable", run=run):
        longest[e["version"]] = max(e["stall"], longest.get(e["version"], 0.0))
    return longest
