"""Measure what grows with the number of nodes, for 2,048, 16,384 and 65,536 ranks.

- *Coordinator*: a save, see ``control_plane_save``.
- *Planning*: a restore, see ``restore_planning``.
- *Upkeep*: the removal of a version, see ``control_plane_upkeep``.
- *Manifest*: what reads all rows of a version, see ``large_manifest``. It takes time and no more memory with more nodes, so there
  are fewer.
- *Commits*: of versions of 65,536 ranks, with 10,000 versions in the root, see ``control_plane``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import report
import typer
from control_plane import MANY, commits
from control_plane_save import RANKS, TENSORS, simulate
from control_plane_upkeep import upkeep, verification
from large_manifest import OPERATIONS, large_manifest
from report import table_of
from restore_planning import planning
from rich.console import Console
from rich.table import Table

NODES = (256, 2048, 8192)
PACKS = 97
WALKED, COMMITS = 128, 12
CPU, MEMORY, TASK, MESSAGE = 5.0, 1 << 30, 0.05, 1 << 20
SECONDS, GROWTH, METADATA = 1.0, 300 << 20, 4_000_000
RECORDS = {2048: 2_000_000, 8192: 8_000_000}


def claims(results: dict[str, Any]) -> dict[str, bool]:
    """Return raystow's goals and whether this run meets them."""
    saves, plans = results["coordinator"], results["planning"].values()
    most, one = saves[-1], [plan[world] for plan in plans for world in ("same", "half")]
    return {
        **{f"a record of {n * RANKS:,} ranks has at most {b / 1e6:.0f} MB": record_of(saves, n) <= b for n, b in RECORDS.items()},
        f"the coordinator's CPU for {most['ranks']:,} ranks, joining included, is at most {CPU:.0f} s": whole_cpu(most) <= CPU,
        f"its memory there is at most {MEMORY >> 20} MiB": most["peak"] <= MEMORY,
        f"no task holds its loop for more than {1e3 * TASK:.0f} ms": most["longest task"] <= TASK,
        "no message of a save has more than 1 MiB": most["largest message"] <= MESSAGE,
        f"a rank plans a restore in at most {SECONDS:.0f} s of CPU": max(plan["cpu"] for plan in one) <= SECONDS,
        f"it takes at most {GROWTH >> 20} MiB": max(plan["grown"] for plan in one) <= GROWTH,
        f"it reads at most {METADATA / 1e6:.0f} MB of metadata": max(plan["metadata"] for plan in one) <= METADATA,
    }


def record_of(saves: list[dict[str, Any]], nodes: int) -> int:
    """Return the bytes of the version record."""
    return int(next(row["record"] for row in saves if row["nodes"] == nodes))


def whole_cpu(row: dict[str, Any]) -> float:
    """Return the CPU seconds of a save and of all ranks joining before it."""
    return float(row["cpu"] + row["cpu of joining"])


def tables(results: dict[str, Any]) -> Iterator[Table]:
    """Yield a table for each part."""
    headings = ("ranks", "packs", "record, MB", "CPU, s", "joining", "longest task, ms", "message, B", "peak, MiB", "of it empty")
    grid = table_of(f"the coordinator, for one save of {TENSORS:,} tensors; by nodes", *headings)
    for row in results["coordinator"]:
        counts = [f"{row[name]:,}" for name in ("nodes", "ranks", "packs")]
        times = f"{row['cpu']:.2f}", f"{row['cpu of joining']:.2f}", f"{1e3 * row['longest task']:.0f}"
        memory = [f"{row[name] / (1 << 20):.0f}" for name in ("peak", "empty")]
        grid.add_row(*counts, f"{row['record'] / 1e6:.2f}", *times, str(row["largest message"]), *memory)
    yield grid
    grid = table_of("planning a restore", "by ranks", "s", "CPU s", "fragments", "metadata, MB", "MiB", "grown by")
    for nodes, plans in results["planning"].items():
        for world in ("same", "half"):
            plan = plans[world]
            sizes = f"{plan['metadata'] / 1e6:.2f}", f"{plan['peak'] / (1 << 20):.0f}", f"{plan['grown'] / (1 << 20):.0f}"
            numbers = f"{plan['ranks']:,}", f"{plan['seconds']:.2f}", f"{plan['cpu']:.2f}", str(plan["fragments"])
            grid.add_row(f"{int(nodes) * RANKS:,} saved", *numbers, *sizes)
    yield grid
    grid = table_of("removal of a version", "objects", "retention, CPU s", "plan", "deletion", "grown by, MiB", "requests")
    for nodes, row in results["upkeep"].items():
        cpus = [f"{row[name]:.2f}" for name in ("retention cpu", "plan cpu", "collection cpu")]
        requests = f"{row['listing requests']:,} list, {row['deletion requests']:,} delete"
        grid.add_row(f"{int(nodes) * RANKS:,}", f"{row['objects']:,}", *cpus, f"{row['grown'] / (1 << 20):.0f}", requests)
    yield grid
    row = results["manifest"]
    grid = table_of(f"a manifest of {row['chunk rows']:,} rows", "CPU s", "us per row", "grown by, MiB", "<requests")
    for name in OPERATIONS:
        one = row[name]
        requests = ", ".join(f"{number:,} {kind}" for kind, number in one["requests"].items())
        grid.add_row(name, f"{one['cpu']:.1f}", f"{1e6 * one['cpu'] / row['chunk rows']:.1f}", f"{one['grown'] >> 20}", requests)
    yield grid
    grid = table_of("commits", "nodes", "root, MB", "CPU ms", "ms", "99 %")
    for row in results["commits"]:
        times = row["commit CPU ms"]["p50"], row["commit ms"]["p50"], row["commit ms"]["p99"]
        grid.add_row(f"{row['live']:,} versions", f"{row['nodes']:,}", f"{row['root'] / 1e6:.2f}", *(f"{ms:.0f}" for ms in times))
    yield grid


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    folder: Annotated[Path | None, typer.Option(help="parent folder of the local store, which is deleted at the end")] = None,
    walked: Annotated[int, typer.Option(min=1, help="nodes of the version whose rows are all read")] = WALKED,
    note: Annotated[str, typer.Option(help="what else the machine does, for the result file")] = "",
    saves: Annotated[int, typer.Option(min=1, help="saves per number of nodes; the most expensive counts")] = 3,
) -> None:
    """Measure the coordinator, the planning of restores, and the removal of a version."""
    console = Console(width=150)
    about: dict[str, Any] = {
        **report.about("raystow", "ray", "torch", "pyarrow"),
        "note": note,
        "saves": saves,
        "node": {"ranks": RANKS, "tensors of each rank": TENSORS},
    }
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        results["coordinator"] = [simulate(f"{place}/nodes-{nodes}", nodes, saves) for nodes in NODES]
    results["planning"] = {str(nodes): planning(3, nodes) for nodes in NODES[1:]}
    results["verification"] = verification(NODES[-1])
    results["upkeep"] = {str(nodes): upkeep(nodes, PACKS) for nodes in NODES[1:]}
    results["manifest"] = large_manifest(walked)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        worlds = [(live, nodes) for nodes in (1, NODES[-1]) for live in (1, MANY)]
        results["commits"] = [
            {"nodes": nodes, **commits(f"{place}/{live}-{nodes}", live, COMMITS, nodes=nodes)} for live, nodes in worlds
        ]
    held = claims(results)
    console.print(f"{about['machine']['cpu']}, {about['machine']['cores']} cores, {about['date']}")
    report.show(console, tables(results), held)
    report.write(console, out, "scale", {**about, "results": results, "claims": held})


if __name__ == "__main__":
    typer.run(main)
