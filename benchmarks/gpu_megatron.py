"""Measure Megatron-Core on two GPUs of one host: what a save costs the training, and what Megatron's own checkpoints cost.

Two ranks train a GPT with ``DistributedOptimizer``, once with tensor and once with data parallelism. First they prove that a run
whose ranks are killed resumes in the bits of an undisturbed one, and that the other layout restores the same state. Then saves
and loads are timed: raystow's, and Megatron's ``torch_dist`` in both formats of the optimizer, also with NVRx if that is
installed. On a single GPU there is one rank. ``--cpu`` needs no GPUs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import ray
import report
import torch
import typer
from gpu_workload import about
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the training is that of the tests

from gpu_megatron_ranks import AT, CONTESTANTS, SEED, STEPS, rank_main

LAYOUTS = {"TP2": {"tp": 2}, "DP2": {"dp": 2}, "DP1": {"dp": 1}}


@dataclass(frozen=True)
class Run:
    """A task of ``gpu_megatron_ranks`` on the ranks of a layout."""

    task: str
    layout: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.layout.get("tp", 1) * self.layout.get("dp", 1)


def launch(runs: list[Run], folder: Path) -> list[list[Any]]:
    """Run tasks at the same time, and return the results of their ranks; none of ranks that are killed."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    running = dict[psutil.Popen, tuple[Run, int]]()
    for number, run in enumerate(runs):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        for rank in range(run.ranks):
            environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(run.ranks)}
            environment |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                "NCCL_NVLS_ENABLE": "0",
            }
            environment |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
            result = str(folder / f"{number}-{rank}.json")
            options = {"layout": run.layout, "folder": str(folder), "result": result, **run.options}
            command = [sys.executable, "-W", "ignore", __file__, "--task", run.task, "--options", json.dumps(options)]
            process = psutil.Popen(command, env={**os.environ, **environment})
            running[process] = run, -signal.SIGKILL if run.options.get("kill") else 0
    alive = list(running)
    while alive:
        ended, alive = psutil.wait_procs(alive, timeout=1)
        if failed := [process for process in ended if process.returncode != running[process][1]]:
            for process in alive:  # they wait for it
                process.kill()
            raise SystemExit(f"a rank of {running[failed[0]][0]} has failed: {failed[0].returncode}")
    results = [[folder / f"{number}-{rank}.json" for rank in range(run.ranks)] for number, run in enumerate(runs)]
    return [[json.loads(path.read_text()) for path in paths if path.exists()] for paths in results]


def differences(ranks: list[Any], others: list[Any]) -> list[str]:
    """Name what differs between two runs, in the order of the steps; only what both have recorded is compared."""
    return [
        f"rank {rank}, {name}: {value} for {others[rank]['trace'][name]}"
        for rank, of_rank in enumerate(ranks)
        for name, value in of_rank["trace"].items()
        if others[rank]["trace"].get(name, value) != value
    ]


def unequal(ranks: list[Any], others: list[Any]) -> list[str]:
    """Name the whole tensors that differ between two states."""
    state = others[0]["state"]
    return [key for key in state if ranks[0]["state"][key] != state[key]]


def prove(layouts: list[str], size: dict[str, int], folder: Path, *, together: bool) -> dict[str, Any]:
    """Compare runs with undisturbed ones. ``together``: run what is independent at the same time."""

    def every(runs: list[Run]) -> list[list[Any]]:
        return launch(runs, folder) if together else [result for run in runs for result in launch([run], folder)]

    def said(name: str, what: str, differing: list[str]) -> None:
        found[name][what] = len(differing)
        text = f"{len(differing)} differ: {'; '.join(differing[:4])}" if differing else "equal"
        print(f"{report.now()} {name}, {what}: {text}", flush=True)

    sized, found = {name: {**layout, **size} for name, layout in LAYOUTS.items()}, {name: dict[str, int]() for name in layouts}
    first = []
    for name in layouts:
        uri = str(folder / name)
        first += [Run("train", sized[name]), Run("train", sized[name], {"uri": f"{uri}-whole"})]
        first += [Run("train", sized[name], {"uri": uri, "kill": True})]
    begun = every(first)
    for name, alone, undisturbed in zip(layouts, begun[::3], begun[1::3], strict=True):
        said(name, "two undisturbed runs, of which one saves", differences(undisturbed, alone))
    again = {name: {"uri": str(folder / name), "seed": SEED + 1} for name in layouts}
    resumed = every([Run("train", sized[name], {**again[name], "load": "same"}) for name in layouts])
    for name, undisturbed, one in zip(layouts, begun[1::3], resumed, strict=True):
        said(name, "the state after loading", unequal(one, undisturbed))
        what = f"{len(one[0]['trace'])} digests of a rank, resumed after step {AT} until step {STEPS}"
        said(name, what, differences(one, undisturbed))
    pair = {"TP2": "DP2", "DP2": "TP2"}
    others = {name: pair[name] for name in layouts if name in pair}
    moved = every([Run("train", sized[others[name]], {**again[name], "load": "other"}) for name in others])
    undisturbed_runs = dict(zip(layouts, begun[1::3], strict=True))
    for name, one in zip(others, moved, strict=True):
        said(name, f"the state loaded in {others[name]}", unequal(one, undisturbed_runs[name]))
    return found


def measured(layout: dict[str, int], folder: Path, contestants: list[str]) -> dict[str, Any]:
    """Return the figures of a layout, and remove its checkpoints."""
    with tempfile.TemporaryDirectory(dir=folder) as root:
        (ranks,) = launch([Run("measure", layout, {"uri": f"{root}/run", "contestants": contestants})], Path(root))
    return {"contestants": contestants, "ranks": ranks}


def tables(results: dict[str, Any], name: str) -> Iterator[Table]:
    """Yield the table of a layout: the later saves and the last load, of the slower rank."""
    found, headings = results[name], ("lost s", "durable s", "peak of host memory GB", "stored GB", "load s")
    ranks = found["ranks"]
    title = f"{name}: {ranks[0]['shard'] / 1e9:.1f} GB a rank, steps of {ranks[0]['step']:.2f} s"
    table = report.table_of(title, *headings)
    for contestant in found["contestants"]:
        rows = [of_rank[contestant] for of_rank in ranks]
        lost, durable = (max(statistics.median(row[key][1:]) for row in rows) for key in ("lost", "durable"))
        peak, stored = max(row["peak"] for row in rows), rows[0]["stored"]
        load = "fails" if isinstance(rows[0]["load"], str) else f"{max(row['load'][-1] for row in rows):.2f}"
        table.add_row(contestant, f"{lost:.2f}", f"{durable:.2f}", f"{peak / 1e9:.2f}", f"{stored / 1e9:.2f}", load)
    yield table


def main(
    layers: Annotated[int, typer.Option(help="layers of the measured model")] = 8,
    hidden: Annotated[int, typer.Option(help="its width")] = 2048,
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    store: Annotated[Path, typer.Option(help="parent folder of the checkpoints, deleted at the end")] = Path("/dev/shm"),
    contestant: Annotated[list[str] | None, typer.Option(help="contestant to measure (repeatable); default: all")] = None,
    layout: Annotated[
        list[str] | None, typer.Option(help=f"one of {', '.join(LAYOUTS)} (repeatable); default: those of as many ranks as GPUs")
    ] = None,
    proof: Annotated[bool, typer.Option(help="prove that runs resume")] = True,
    figures: Annotated[bool, typer.Option(help="measure saves and loads")] = True,
    cpu: Annotated[bool, typer.Option(help="try the script on a CPU, with a small model")] = False,
    task: Annotated[str, typer.Option(hidden=True)] = "",
    options: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Prove that runs resume, and measure saves and loads."""
    if task:
        rank_main(task, json.loads(options))
        return
    console, contestants, layouts = Console(width=160), report.chosen(contestant, CONTESTANTS), report.chosen(layout, LAYOUTS)
    if not layout:
        layouts = ["DP1"] if torch.cuda.device_count() == 1 else ["TP2", "DP2"]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    size = {"layers": 4, "hidden": 64} if cpu else {"layers": layers, "hidden": hidden, "length": 512, "vocabulary": 32_768}
    small = size if cpu else {**size, "layers": 2, "hidden": 512, "vocabulary": 8192}
    results: dict[str, Any] = {**about(torch.device("cpu" if cpu else "cuda")), "settings": size}
    with tempfile.TemporaryDirectory(prefix="raystow-megatron-", dir=store) as root:
        if proof:
            results["equal"] = prove(layouts, small, Path(root), together=not cpu)
            report.keep(out, "gpu_megatron", results)
        if figures:
            results["layouts"] = {}
            for name in layouts:
                results["layouts"][name] = measured({**LAYOUTS[name], **size}, Path(root), contestants)
                report.keep(out, "gpu_megatron", results)
                report.show(console, tables(results["layouts"], name), {})
    if any(one for of in results.get("equal", {}).values() for one in of.values()):
        raise SystemExit("runs differ")
    report.leave()


if __name__ == "__main__":
    typer.run(main)
