"""Measure Megatron-Core on two GPUs of one host: what a save costs the training, and what Megatron's own checkpoints cost.

Two ranks train a GPT with ``DistributedOptimizer``, once with tensor and once with data parallelism. First they prove that a run
whose ranks are killed resumes in the bits of an undisturbed one, and that the other layout restores the same state. Then saves
and loads are timed: raystow's, and Megatron's ``torch_dist`` in both formats of the optimizer. ``--cpu`` needs no GPUs.
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


@dataclass(frozen=True)
class Run:
    """A task of ``gpu_megatron_ranks`` on two ranks."""

    task: str
    layout: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)


def launch(runs: list[Run], folder: Path) -> list[list[Any]]:
    """Run tasks at the same time, each on two ranks, and return the results of their ranks; none of ranks that are killed."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    running = dict[psutil.Popen, tuple[Run, int]]()
    for number, run in enumerate(runs):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        for rank in range(2):
            environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            environment |= {"MASTER_PORT": str(port), "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_NVLS_ENABLE": "0"}
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
    results = [[folder / f"{number}-{rank}.json" for rank in range(2)] for number in range(len(runs))]
    return [[json.loads(path.read_text()) for path in paths if path.exists()] for paths in results]


def differences(ranks: list[Any], others: list[Any]) -> list[str]:
    """Name what differs between two runs, in the order of the steps; only what both have recorded is compared."""
    return [
        f"rank {rank}, {name}: {value} for {others[rank]['trace'][name]}"
        for rank, of_rank in enumerate(ranks)
        for name, value in of_rank["trace"].items()
        if others[rank]["trace"].get(name, value) != value
    ]


def prove(layouts: dict[str, dict[str, int]], folder: Path, *, together: bool) -> dict[str, Any]:
    """Assert what the script promises about bits. ``together``: run what is independent at the same time."""

    def every(runs: list[Run]) -> list[list[Any]]:
        return launch(runs, folder) if together else [result for run in runs for result in launch([run], folder)]

    uris = {name: str(folder / name) for name in layouts}
    first = []
    for name, layout in layouts.items():
        first += [Run("train", layout), Run("train", layout, {"uri": f"{uris[name]}-whole"})]
        first += [Run("train", layout, {"uri": uris[name], "kill": True})]
    begun = every(first)
    second = []
    for name, layout in layouts.items():
        others = [other for key, other in layouts.items() if key != name]
        second += [Run("train", layout, {"uri": uris[name], "load": "same", "seed": SEED + 1})]
        second += [Run("train", other, {"uri": uris[name], "load": "other", "seed": SEED + 1}) for other in others]
    ended, found = every(second), dict[str, Any]()
    for number, name in enumerate(layouts):
        alone, undisturbed, _ = begun[3 * number : 3 * number + 3]
        resumed, *moved = ended[len(layouts) * number : len(layouts) * (number + 1)]
        compared = {
            "two runs without a kill": differences(undisturbed, alone),
            "resumed": differences(resumed, undisturbed),
            "loaded": [key for key, value in undisturbed[0]["state"].items() if resumed[0]["state"][key] != value],
            "loaded in another layout": [
                key for key, value in undisturbed[0]["state"].items() for one in moved if one[0]["state"][key] != value
            ],
        }
        same = len(resumed[0]["trace"])
        print(f"{name}: killed after step {AT}, resumed until step {STEPS}: {same} digests of a rank", flush=True)
        for what, differing in compared.items():
            print(
                f"{name}, {what}: {f'{len(differing)} differ: ' + '; '.join(differing[:4]) if differing else 'equal'}", flush=True
            )
        found[name] = {"digests of a rank": same, "differing": {what: len(those) for what, those in compared.items()}}
    return found


def measured(layout: dict[str, int], folder: Path) -> dict[str, Any]:
    """Return the figures of a layout, and remove its checkpoints."""
    import raystow

    with tempfile.TemporaryDirectory(dir=folder) as root:
        uri = f"{root}/run"
        (ranks,) = launch([Run("measure", layout, {"uri": uri})], Path(root))
        version = raystow.latest(uri)
        assert version is not None
        return {"raw": version.raw, "stored": version.bytes, "ranks": ranks}


def tables(results: dict[str, Any], name: str) -> Iterator[Table]:
    """Yield the table of a layout: the later saves and the last load, of the slower rank."""
    found, headings = results[name], ("lost s", "durable s", "peak of host memory GB", "stored GB", "load s")
    ranks = found["ranks"]
    title = f"{name}: {found['raw'] / 1e9:.1f} GB, {ranks[0]['shard'] / 1e9:.1f} GB a rank, steps of {ranks[0]['step']:.2f} s"
    table = report.table_of(title, *headings)
    for contestant in CONTESTANTS:
        rows = [of_rank[contestant] for of_rank in ranks]
        lost, durable = (max(statistics.median(row[key][1:]) for row in rows) for key in ("lost", "durable"))
        peak, stored = max(row["peak"] for row in rows), rows[0].get("stored", found["stored"])
        load = "fails" if isinstance(rows[0]["load"], str) else f"{max(row['load'][-1] for row in rows):.2f}"
        table.add_row(contestant, f"{lost:.2f}", f"{durable:.2f}", f"{peak / 1e9:.2f}", f"{stored / 1e9:.2f}", load)
    yield table


def main(
    layers: Annotated[int, typer.Option(help="layers of the measured model")] = 8,
    hidden: Annotated[int, typer.Option(help="its width")] = 2048,
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    store: Annotated[Path, typer.Option(help="parent folder of the checkpoints, deleted at the end")] = Path("/dev/shm"),
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
    console = Console(width=160)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    size = {"layers": 4, "hidden": 64} if cpu else {"layers": layers, "hidden": hidden, "length": 512, "vocabulary": 32_768}
    small = size if cpu else {**size, "layers": 2, "hidden": 1024, "vocabulary": 8192}
    results: dict[str, Any] = {**about(torch.device("cpu" if cpu else "cuda")), "settings": size}
    with tempfile.TemporaryDirectory(prefix="raystow-megatron-", dir=store) as root:
        if proof:
            results["equal"] = prove({"TP2": {"tp": 2, **small}, "DP2": {"dp": 2, **small}}, Path(root), together=not cpu)
            report.keep(out, "gpu_megatron", results)
        if figures:
            results["layouts"] = {}
            for name, layout in {"TP2": {"tp": 2}, "DP2": {"dp": 2}}.items():
                results["layouts"][name] = measured({**layout, **size}, Path(root))
                report.keep(out, "gpu_megatron", results)
                report.show(console, tables(results["layouts"], name), {})
    if any(one for of in results.get("equal", {}).values() for one in of["differing"].values()):
        raise SystemExit("runs differ")


if __name__ == "__main__":
    typer.run(main)
