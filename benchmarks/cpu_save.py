"""Measure the cost of a save of tensors in host memory: CPU seconds of all processes, blocked training time, and time until
durable. One run compares raystow, torch.save, DCP and torch_checkpointing.

*State.* That of ``cpu_cold``, ``--copies`` times: bf16 weights, fp32 master copy and two moments, .77 GB by default. Before each
save all elements change by about a thousandth, as an optimizer's step changes them.

*Method.* Each measurement is a new process: it starts what the contestant needs, saves twice without counting, and then
``--saves`` times, one after another; a save that is durable is deleted. The CPU seconds are those of the process and all its
descendants, Ray's included, from ``save`` until it is durable; those of an equally long pause after the saves are subtracted.
Contestants take turns in every round; a cell is the median of all saves.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import cpu_cold
import report
import torch
import typer
from gpu_contestants import DCP, PEERS, TORCH_CHECKPOINTING, Contestant, field
from rich.console import Console

OURS = "raystow"
CASES = (OURS, *PEERS)


def changed(state: dict[str, dict[str, torch.Tensor]]) -> None:
    """Change all elements by about a thousandth."""
    for tensors in state.values():
        for tensor in tensors.values():
            tensor += 1e-3 * tensor * torch.randn(tensor.shape)


def case(way: str, folder: Path, saves: int, copies: int) -> dict[str, list[float]]:
    """Save several times in this process; return blocked, durable and CPU seconds, and the stored bytes."""
    parts = cpu_cold.state(0)
    state = {
        f"{part}{copy}": {name: one.clone() for name, one in inner.items()}
        for copy in range(copies)
        for part, inner in parts.items()
        if isinstance(inner, dict)
    }
    if way == OURS:
        import ray

        ray.init(address="local", include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    makers: dict[str, Callable[[], Contestant]] = field(folder, ("deflate",), None)
    contestant = makers["raystow deflate" if way == OURS else way]()
    found: dict[str, list[float]] = {"held": [], "durable": [], "cpu": [], "stored": []}
    for turn in range(-2, saves):
        changed(state)
        cpu, start = report.cpu_seconds(), time.perf_counter()
        wait = contestant.save(state, turn + 2)
        contestant.fence()
        held = time.perf_counter() - start
        wait()
        durable = time.perf_counter() - start
        used = report.cpu_seconds() - cpu
        if turn >= 0:
            for name, value in (("held", held), ("durable", durable), ("cpu", used), ("stored", contestant.stored())):
                found[name].append(value)
        contestant.discard()
    cpu, pause = report.cpu_seconds(), sum(found["durable"])
    time.sleep(pause)
    idle = (report.cpu_seconds() - cpu) / pause
    found["cpu"] = [used - idle * seconds for used, seconds in zip(found["cpu"], found["durable"], strict=True)]
    found["bytes"] = [sum(one.nbytes for inner in state.values() for one in inner.values())]
    return found


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    store: Annotated[Path, typer.Option(help="parent folder of the checkpoints, deleted at the end")] = Path("/dev/shm"),
    rounds: Annotated[int, typer.Option(min=1, help="processes of each contestant")] = 3,
    saves: Annotated[int, typer.Option(min=1, help="measured saves of a process")] = 3,
    copies: Annotated[int, typer.Option(min=1, help="size of the state, in 193 MB")] = 4,
    contestant: Annotated[list[str] | None, typer.Option(help="contestant to measure (repeatable); default: all")] = None,
    note: Annotated[str, typer.Option(help="recorded: what else ran on the machine")] = "",
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure the cost of a save of tensors in host memory."""
    if one:
        with tempfile.TemporaryDirectory(prefix="raystow-cpu-save-", dir=store) as folder:
            print(json.dumps(case(one, Path(folder), saves, copies)), flush=True)
        os._exit(0)  # threads of other libraries would block the exit
    ways = report.chosen(contestant, CASES)
    about: dict[str, Any] = {**report.about("raystow", "ray", "torch", "torch_checkpointing"), "note": note}
    found: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
    for turn in range(rounds):
        for way in (*ways[turn % len(ways) :], *ways[: turn % len(ways)]):
            command = [sys.executable, __file__, "--one", way, "--store", str(store)]
            command += ["--saves", str(saves), "--copies", str(copies)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            for name, values in json.loads(output.splitlines()[-1]).items():
                found[way].setdefault(name, []).extend(values)
    rows = {way: {name: statistics.median(values) for name, values in output.items()} for way, output in found.items()}
    table = report.table_of("a save of tensors in host memory", "held s", "durable s", "CPU s/GB", "ratio")
    for way, row in rows.items():
        row["cpu s/GB"], row["ratio"] = row["cpu"] / (row["bytes"] / 1e9), row["stored"] / row["bytes"]
        table.add_row(way, f"{row['held']:.3f}", f"{row['durable']:.2f}", f"{row['cpu s/GB']:.2f}", f"{row['ratio']:.3f}")
    claims: dict[str, bool | None] = {}
    if all(way in rows for way in (OURS, DCP, TORCH_CHECKPOINTING)):
        for what, claim in (("held", "training is held"), ("cpu s/GB", "CPU seconds per GB")):
            best = min(rows[way][what] for way in (DCP, TORCH_CHECKPOINTING))
            claims[f"{claim}: at most 1.2 times the best peer"] = rows[OURS][what] <= 1.2 * best
    report.show(Console(width=120), [table], claims)
    about["load after"] = os.getloadavg()[0]
    settings = {"store": str(store), "rounds": rounds, "saves": saves, "copies": copies}
    report.write(
        Console(width=120), out, "cpu_save", {**about, "settings": settings, "ways": rows, "all": found, "claims": claims}
    )


if __name__ == "__main__":
    typer.run(main)
