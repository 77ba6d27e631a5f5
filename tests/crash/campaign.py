"""The trials of an act, run one after another, and their results."""

from __future__ import annotations

import functools
import itertools
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from crash.trial import ACTS, Missed, Stage
from crash.trial_cluster import CLUSTER, PART
from crash.tripwire import Point, Target

TABLE: dict[tuple[str, str, str, str], Counter[str]] = {}
"""Store, act, phase and process -> numbers of points, trials, and trials that missed their point."""

Victims = Callable[[str], Sequence[tuple[str, ...]]]
"""Returns for the process at a point the groups of processes to kill: one trial for each group."""

_ONLY = "RAYSTOW_CRASH"
"""The variable that selects a single trial."""
_TRIES, _MOST_FAILURES, _MISSED_SHARE = 4, 3, 0.1
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Trial:
    """A planned trial; its text is a value of ``RAYSTOW_CRASH``."""

    act: str
    point: Point
    victims: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.act} | {self.point.process} | {self.point.name} | {','.join(self.victims)}"


def itself(process: str) -> Sequence[tuple[str, ...]]:
    """Return the process at the point."""
    return [(process,)]


def everyone(process: str) -> Sequence[tuple[str, ...]]:
    """Return all processes, as if the machine went down."""
    return [(*CLUSTER, PART)]


def another(process: str) -> Sequence[tuple[str, ...]]:
    """Return each of the other processes; the process at the point is stopped meanwhile, and then continues."""
    return [(other,) for other in CLUSTER if other != process]


def the_part(process: str) -> Sequence[tuple[str, ...]]:
    """Return the process of the part, while another process is at the point."""
    return [(PART,)] if process != PART else []


@functools.lru_cache
def points(stage: Stage, act: str) -> tuple[Point, ...]:
    """Find the points of an act by a run without a kill."""
    found = stage.count(ACTS[act])
    for point in found:
        _row(stage, act, point)["points"] += 1
    return tuple(found)


def run(stage: Stage, act: str, victims: Victims, *, most: int | None = None) -> None:
    """Run all trials of an act, or ``most`` of them, spread evenly; fail with the tracebacks of the failed trials."""
    trials = [Trial(act, point, who) for point in points(stage, act) for who in victims(point.process)]
    if (only := os.environ.get(_ONLY)) is not None:
        trials = [trial for trial in trials if str(trial) == only]
    elif most is not None and len(trials) > most:
        stride = len(trials) // most
        trials = [trials[i * len(trials) // most + i % stride] for i in range(most)]  # varies the victims between points
    if not trials:
        pytest.skip(f"not the trial that {_ONLY} names")
    failures = list(itertools.islice(_failures(stage, trials), _MOST_FAILURES))
    assert not failures, "\n\n".join(failures)
    missed = sum(_row(stage, act, trial.point)["missed"] for trial in {trial.point.process: trial for trial in trials}.values())
    assert missed <= max(2, _MISSED_SHARE * len(trials)), f"{missed} trials did not come by their points"


def _failures(stage: Stage, trials: Sequence[Trial]) -> Iterator[str]:
    for trial in trials:
        row = _row(stage, trial.act, trial.point)
        row["trials"] += 1
        target = Target(trial.point.process, trial.point.name, trial.victims)
        try:
            for left in reversed(range(_TRIES)):
                try:
                    stage.trial(ACTS[trial.act], f"trial-{next(_numbers)}", target)
                    break
                except Missed:
                    row["missed"] += not left
        except Exception:
            yield f"alone again with {_ONLY}='{trial}'\n{traceback.format_exc()}"


def _row(stage: Stage, act: str, point: Point) -> Counter[str]:
    return TABLE.setdefault((stage.place.name, act, point.phase, point.process), Counter())
