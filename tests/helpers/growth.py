"""Resources of processes over many saves, which must not grow: measured, checked and drawn.

``GROWTH_RESULTS=benchmarks/results pytest -m slow -k growth`` writes result files and plots; ``GROWTH_SAVES=500`` is shorter.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import psutil

SAVES = int(os.environ.get("GROWTH_SAVES", "2000"))
SAMPLES = 40
ALLOWED = {"descriptors": 3, "threads": 3, "memory MB": 24, "shared memory MB": 1}
"""Allowed difference between the last and the second quarter, in each process."""

Course = dict[str, list[float]]
"""Samples by name: a key of ``ALLOWED``, with the name of a process before it if there are several."""


def sample(course: Course, processes: dict[str, psutil.Process]) -> None:
    """Append the current resources of each process."""
    for name, process in processes.items():
        found = {
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
            "memory MB": process.memory_info().rss / 1e6,
            "shared memory MB": sum(_rings(Path(f"/proc/{process.pid}/smaps").read_text())) / 1e3,
        }
        for what, value in found.items():
            course.setdefault(f"{name} {what}".strip(), []).append(round(value, 1))


def _rings(smaps: str) -> Iterable[int]:
    """Yield the kB of anonymous files, which include rings and packs in memory."""
    for entry in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE):
        if "memfd:" in entry.partition("\n")[0]:
            yield from (int(kb) for kb in re.findall(r"^Shared_(?:Clean|Dirty): +(\d+)", entry, re.MULTILINE))


def check_flat(course: Course) -> None:
    for name, values in course.items():
        quarter = len(values) // 4
        before, after = statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])
        allowed = next(most for what, most in ALLOWED.items() if name == what or name.endswith(f" {what}"))
        assert after - before <= allowed, f"{name} grows from {before:g} to {after:g}: {values}"


def write(name: str, course: Course, saves: int, default: Path) -> None:
    """Write the result file and the plot to ``$GROWTH_RESULTS``."""
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    about = {
        "date": date,
        "machine": f"{len(os.sched_getaffinity(0))} cores, no GPU",
        "versions": {"python": platform.python_version(), **{each: version(each) for each in ("raystow", "torch", "ray")}},
        "saves": saves,
        "allowed growth": ALLOWED,
    }
    file = Path(os.environ.get("GROWTH_RESULTS", default)) / f"{name}-{date[:10]}.json"
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in (about | course).items())
    file.write_text(f"{{\n{lines}\n}}\n")
    _draw(course, saves, file.with_suffix(".svg"))


def _draw(course: Course, saves: int, path: Path) -> None:
    """Draw one line for each value, from zero to its largest."""
    parts = []
    for row, (name, values) in enumerate(course.items()):
        top, last, base = max(max(values), 1.0), max(1, len(values) - 1), 100 * row + 90
        points = " ".join(f"{20 + 560 * i / last:.1f},{base - 60 * value / top:.1f}" for i, value in enumerate(values))
        text = f"{name}: {values[0]:.0f} at first, {max(values):.0f} at most, {values[-1]:.0f} after {saves} saves"
        parts.append(f'<text x="20" y="{base - 68}">{text}</text>')
        parts.append(f'<path d="M20,{base - 62}V{base}H580" fill="none" stroke="silver"/>')
        parts.append(f'<polyline fill="none" stroke="black" points="{points}"/>')
    size = f'width="600" height="{100 * len(course)}" font-family="sans-serif" font-size="12"'
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>\n')
