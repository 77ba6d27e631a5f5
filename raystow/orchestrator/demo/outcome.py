"""What the two trainings came to: whether they ended in the same bits, and how the failure went."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...storage.coding import dtypes
from ...storage.reader import Request
from ...storage.repository import Repository
from ...storage.version import Version
from .events import Event

Opaque = npt.NDArray[np.void]


@dataclass(frozen=True)
class Comparison:
    """``tensors`` compared, the names of those that ``differ``, and the losses compared and differing after the restore."""

    tensors: int
    differ: tuple[str, ...]
    losses: int
    losses_differ: int

    @property
    def same(self) -> bool:
        """Whether something was compared, and nothing differs."""
        return self.tensors > 0 and self.losses > 0 and not self.differ and not self.losses_differ


def compare(undisturbed: Repository, disturbed: Repository, events: list[Event]) -> Comparison:
    """Hold the final versions against each other bit for bit, and the losses of every step that was trained after the restore."""
    ours, theirs = undisturbed.latest(), disturbed.latest()
    assert ours is not None
    assert theirs is not None
    first, second = _contents(ours), _contents(theirs)
    names = sorted(set(first) | set(second))
    differ = tuple(name for name in names if name not in first or name not in second or not _equal(first[name], second[name]))
    reference = {(e["rank"], e["step"]): e["loss"] for e in events if e["event"] == "step" and e["run"] == "undisturbed"}
    restored = max(e["time"] for e in events if e["event"] == "restored")
    again = [e for e in events if e["event"] == "step" and e["run"] == "disturbed" and e["time"] > restored]
    wrong = sum(reference.get((e["rank"], e["step"])) != e["loss"] for e in again)
    return Comparison(len(names), differ, len(again), wrong)


def _contents(version: Version) -> dict[str, Opaque]:
    """Every tensor as opaque items, all read in one pass."""
    targets = {name: np.empty(info.shape, f"V{dtypes.dtype(info.dtype).itemsize}") for name, info in version.tensors().items()}
    whole = {name: ((0,) * target.ndim, target.shape) for name, target in targets.items()}
    version.reader().fill(Request(name, version.chunks[name], whole[name], target) for name, target in targets.items())
    return targets


def _equal(first: Opaque, second: Opaque) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


@dataclass(frozen=True)
class Failure:
    """Times in seconds after the node was killed; ``step`` and ``restored_step`` bound the steps that were lost."""

    step: int
    processes: int
    detected: float
    restored: float
    version: int
    restored_step: int
    durable: float


def failure(events: list[Event]) -> Failure:
    """When what happened after the kill."""
    killed = next(e for e in events if e["event"] == "killed")
    after = [e for e in events if e["time"] > killed["time"]]
    restored = [e for e in after if e["event"] == "restored"]
    last = max(restored, key=lambda e: float(e["time"]))
    return Failure(
        step=killed["step"],
        processes=killed["processes"],
        detected=next(e["time"] for e in after if e["event"] == "detected") - killed["time"],
        restored=last["time"] - killed["time"],
        version=last["version"],
        restored_step=last["step"],
        durable=next(e["time"] for e in after if e["event"] == "durable" and e["time"] > last["time"]) - killed["time"],
    )


def stalls(events: list[Event], run: str) -> dict[int, float]:
    """Version id -> the longest that a rank was held up by the save, in seconds."""
    longest: dict[int, float] = {}
    for e in events:
        if e["event"] == "durable" and e["run"] == run:
            longest[e["version"]] = max(e["stall"], longest.get(e["version"], 0.0))
    return longest
