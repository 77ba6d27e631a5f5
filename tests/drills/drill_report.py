"""The outcome of a drill: a line of the table in docs/failures.md."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raystow.storage.runtime.clock import SYSTEM

HEADER = (
    "| what died | detected after s | restored from | memory MB | peers MB | store MB | steps lost | back after s |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
)


@dataclass(frozen=True)
class Drill:
    """The outcome of a drill.

    ``detected``: seconds until the process that must react detected the failure; 0 if none must. ``restored``: the source of the
    state, in words. ``read``: bytes by source ("memory", "peer", "store"). ``lost``: steps that were trained twice. ``seconds``:
    from the failure until training continued.
    """

    died: str
    detected: float
    restored: str
    seconds: float
    lost: int = 0
    read: Mapping[str, int] = field(default_factory=Counter)

    def line(self) -> str:
        megabytes = [f"{self.read.get(source, 0) / 1e6:.1f}" for source in ("memory", "peer", "store")]
        detected = f"{self.detected:.1f}" if self.detected else "-"
        cells = [self.died, detected, self.restored, *megabytes, str(self.lost), f"{self.seconds:.1f}"]
        return "| " + " | ".join(cells) + " |\n"


def source(version: int, read: Mapping[str, int]) -> str:
    """Describe the restored version and its sources."""
    names = {"memory": "memory", "peer": "other nodes", "store": "store"}
    return f"version {version}: {', '.join(name for place, name in names.items() if read.get(place))}"


class Stopwatch:
    """Measures the time since a failure."""

    def __init__(self) -> None:
        self._begun = SYSTEM.monotonic()

    def seconds(self) -> float:
        return SYSTEM.monotonic() - self._begun


def write_table(path: Path, drills: Sequence[Drill]) -> None:
    """Write the drills into the table of a Markdown file, or into a new file; lines of the same drill are replaced."""
    text = path.read_text() if path.exists() else HEADER
    before, _, rest = text.partition(HEADER)
    old = list(itertools.takewhile(lambda line: line.startswith("|"), rest.splitlines(keepends=True)))
    lines = {line.split("|")[1].strip(): line for line in old} | {drill.died: drill.line() for drill in drills}
    path.write_text(before + HEADER + "".join(lines.values()) + rest.removeprefix("".join(old)))
