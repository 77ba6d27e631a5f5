"""Descriptors, threads, memory and shared memory over thousands of saves: a flat line.

``GROWTH_SAVES=500 GROWTH_PLOT=growth.svg pytest tests/soak -m slow`` runs fewer saves and draws them.
"""

from __future__ import annotations

import gc
import os
import re
import statistics
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
from local_cluster import LocalCluster

from raystow.orchestrator.coordinator.housekeeping import Housekeeping
from raystow.storage.retention.policy import Policy

SAVES = int(os.environ.get("GROWTH_SAVES", "2000"))
ALLOWED = {"descriptors": 3, "threads": 3, "memory MB": 24, "shared memory MB": 1}
"""How much the last quarter may be above the second one."""


def measured() -> dict[str, float]:
    gc.collect()
    shared = sum(int(kb) for kb in re.findall(r"^Shared_(?:Clean|Dirty): +(\d+)", _ring_maps(), re.MULTILINE))
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "memory MB": psutil.Process().memory_info().rss / 1e6,
        "shared memory MB": shared / 1e3,
    }


def _ring_maps() -> str:
    """The mappings of anonymous files, which rings and packs in memory are."""
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    return "".join(entry for entry in entries if "memfd:" in entry.partition("\n")[0])


def growth(folder: Path, saves: int) -> dict[str, list[float]]:
    """Save ``saves`` times with retention; the course of each value in 40 samples."""
    course: dict[str, list[float]] = {name: [] for name in ALLOWED}
    rng = np.random.default_rng(0)
    state = {"w": rng.standard_normal(50_000), "b": rng.standard_normal(100)}
    gc.freeze()  # what other tests have left would be looked through for each sample
    with LocalCluster(str(folder), memory=32 << 20) as cluster:
        housekeeping = Housekeeping(cluster.committer, grace=0.0)
        for step in range(saves):
            state["w"][step % 1000 :: 1000] += 1
            cluster.save({**state, "step": step}, step=step)
            if step % 10 == 9:
                housekeeping.run(Policy(keep_last=3))
            if step % max(1, saves // 40) == 0:
                for name, value in measured().items():
                    course[name].append(value)
        assert len(cluster.repository.versions()) <= 13
    gc.unfreeze()
    return course


def check_flat(course: dict[str, list[float]]) -> None:
    for name, values in course.items():
        quarter = len(values) // 4
        before, after = statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])
        assert after - before <= ALLOWED[name], f"{name} grows from {before:g} to {after:g}: {values}"


def draw(course: dict[str, list[float]], path: Path) -> None:
    """Write one line for each value to an SVG file."""
    parts = []
    for row, (name, values) in enumerate(course.items()):
        top, last = max(max(values), 1.0), max(1, len(values) - 1)
        points = " ".join(f"{20 + 560 * i / last:.1f},{100 * row + 90 - 60 * value / top:.1f}" for i, value in enumerate(values))
        parts.append(f'<text x="20" y="{100 * row + 20}">{name}, up to {top:.0f}</text>')
        parts.append(f'<polyline fill="none" stroke="black" points="{points}"/>')
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" width="600" height="400" font-size="12">{"".join(parts)}</svg>\n')


@pytest.mark.slow
def test_nothing_grows_over_thousands_of_saves(tmp_path: Path) -> None:
    course = growth(tmp_path / "run", SAVES)
    draw(course, Path(os.environ.get("GROWTH_PLOT", tmp_path / "growth.svg")))
    check_flat(course)


def test_nothing_grows_over_some_saves(tmp_path: Path) -> None:
    check_flat(growth(tmp_path / "run", 40))


def test_a_leak_is_found() -> None:
    with pytest.raises(AssertionError, match="descriptors grows from"):
        check_flat({"descriptors": [float(i) for i in range(40)]})
