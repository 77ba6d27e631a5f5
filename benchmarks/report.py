"""Shared by all benchmarks: the description of the machine, tables, goals, and the result file."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import typer
from rich.console import Console
from rich.table import Table


def cpu() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(": ")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def machine() -> dict[str, Any]:
    """Describe the machine."""
    return {
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load before": os.getloadavg()[0],
        "os": platform.platform(),
    }


def now() -> str:
    """Return the current time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def about(*packages: str) -> dict[str, Any]:
    """Describe when and where a benchmark runs, with the versions of these packages."""
    versions = {"python": platform.python_version(), **{name: _version(name) for name in packages}}
    return {"date": now(), "machine": machine(), "versions": versions}


def _version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed, but in ``PYTHONPATH``."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def chosen(names: Sequence[str] | None, known: Iterable[str]) -> list[str]:
    """Return the names given to an option, by default all ``known`` ones; an error of the command line for an unknown name."""
    known = list(known)
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(f"there is no {name!r}; choose of {', '.join(map(repr, known))}")
    return list(names or known)


def peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes.

    ``getrusage`` is not used, because a new process inherits its parent's value.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def table_of(title: str, *headings: str) -> Table:
    """Make a table with a column of names; columns whose heading starts with ``<`` are aligned to the left."""
    table = Table(title=title, title_justify="left")
    for heading in ("<", *headings):
        table.add_column(heading.lstrip("<"), justify="left" if heading.startswith("<") else "right")
    return table


def show(console: Console, tables: Iterable[Table], claims: Mapping[str, bool | None]) -> None:
    """Print tables and whether this run meets each goal; None: not measured."""
    for table in tables:
        console.print(table)
    for claim, met in claims.items():
        console.print(f"{'not measured' if met is None else 'met' if met else 'NOT MET'}: {claim}", highlight=False)


def write(console: Console, folder: Path, name: str, results: Mapping[str, Any]) -> None:
    """Write the result file and print its path."""
    console.print(f"written to {keep(folder, name, results)}")


def keep(folder: Path, name: str, results: Mapping[str, Any]) -> Path:
    """Write the result file with what has been measured so far; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{results['date'][:10]}.json"
    file.write_text(json.dumps(results, indent=1) + "\n")
    return file


def leave() -> None:
    """End the process immediately, because threads of other libraries would block its exit."""
    import ray

    ray.shutdown()
    sys.stdout.flush()
    os._exit(0)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its descendants so far; a parent counts its ended children."""
    total, here = 0.0, psutil.Process()
    for process in (here, *here.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
