"""The settings of a demo, which its processes pass to each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

UNDISTURBED, DISTURBED = RUNS = "undisturbed", "disturbed"
EVENTS, RAY_TRAIN = "events", "ray-train"  # folders
WORKERS = 2
BATCH = 4
"""Rows that each worker trains on in a step."""


@dataclass(frozen=True)
class DemoSettings:
    """``folder``: of events and logs. ``stores``: the URI of each run. ``every``: steps between saves."""

    folder: str
    stores: dict[str, str]
    steps: int
    every: int

    @property
    def events(self) -> Path:
        """The folder of the event logs."""
        return Path(self.folder) / EVENTS

    @property
    def strike(self) -> int:
        """The step during whose save a node is killed in the disturbed run."""
        return max(2 * self.every, (self.steps * 2 // 3) // self.every * self.every)
