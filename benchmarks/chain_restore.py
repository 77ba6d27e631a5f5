"""How long a version takes to restore that is stored as differences, beside one that is whole.

A GPT (see ``study_models``) trains in mixed precision and saves every 10 steps through two ``Checkpointer``s: to one repository
every version is whole, in the other all but the first are differences to that (``delta=``). A copy of the first is thinned to a
chain, each version the difference to the one before, as ``raystow prune --resumable 1 --delta 6`` does. Then versions are
restored into tensors in host memory, whole ones and those at the end of what they are a difference to, in turns: repository
opened, planned, read, decoded. Everything is in the page cache. Every tensor is held bit for bit against what was saved.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import ray
import torch
import typer
from gpu_workload import Size, State, about, corpus, device_named, nbytes
from rich.console import Console
from rich.table import Table
from study_models import Run, copied, gpt

import raystow
from raystow.orchestrator.restore import plan_restore, restore
from raystow.storage.retention.chaining import MOST

WHOLE, ROW, CHAIN = "whole", "row", "chain"


def saved(run: Run, root: Path, versions: int, every: int) -> list[dict[str, dict[str, Any]]]:
    """Train and save to both; the state of each version, in host memory."""
    found = []
    alone: dict[str, Any] = {"rank": 0, "world_size": 1, "replicas": 0}
    with (
        raystow.Checkpointer(str(root / WHOLE), keep_in_memory=0, **alone) as whole,
        raystow.Checkpointer(str(root / ROW), delta=versions, **alone) as row,
    ):
        for _ in range(versions):
            list(run.train(every))
            for checkpointer in (whole, row):
                checkpointer.save(run.state(), step=run.step).result(600)
            found.append(copied(run.state()))
    return found


def restored(folder: Path, number: int, kept: State, groups: tuple[str, ...]) -> tuple[float, int]:
    """Seconds, and bytes read, for these groups of the version of that number."""
    into = {group: {name: torch.zeros_like(tensor) for name, tensor in kept[group].items()} for group in groups}
    begin = time.perf_counter()
    version = raystow.open(str(folder)).versions()[number]
    restore(version, into, strict=False)
    seconds = time.perf_counter() - begin
    for group, tensors in into.items():
        for name, tensor in tensors.items():
            if not torch.equal(tensor.view(torch.uint8), kept[group][name].view(torch.uint8)):
                raise SystemExit(f"{folder.name}: {group}.{name} is not what was saved")
    return seconds, plan_restore(version, into, strict=False).nbytes


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    rounds: Annotated[int, typer.Option(min=1, help="restores of each kind that count")] = 7,
    every: Annotated[int, typer.Option(min=1, help="steps between versions")] = 10,
    warm_up: Annotated[int, typer.Option(min=0, help="steps before the first")] = 30,
    device: Annotated[str, typer.Option(help="cpu, or cuda for a larger model")] = "cpu",
    layers: Annotated[int, typer.Option(help="of the model")] = 3,
    width: Annotated[int, typer.Option(help="of the model, a multiple of 64")] = 768,
    batch: Annotated[int, typer.Option(help="sequences in a batch")] = 1,
) -> None:
    """Train, save, thin, restore in turns."""
    where, console = device_named(device), Console(width=110)
    size = Size(layers=layers, width=width, batch=batch, context=128, vocabulary=4000)
    logging.getLogger("raystow").setLevel(logging.ERROR)  # what is left out of a restore is meant to be
    torch.manual_seed(0)
    versions = MOST + 2  # the newest stays resumable; before it a whole one, and as many differences as there may be
    run = Run(gpt(size), corpus(size, where), size, seed=1)
    list(run.train(warm_up))
    results: dict[str, Any] = {**about(where), "settings": {"rounds": rounds, "every": every, "size": vars(size)}}
    ray.init("local", num_cpus=os.cpu_count(), log_to_driver=False, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        states = saved(run, root, versions, every)
        ray.shutdown()
        shutil.copytree(root / WHOLE, root / CHAIN, copy_function=os.link)  # objects are never changed, and records are replaced
        raystow.open(str(root / CHAIN)).plan_retention(raystow.Policy(resumable=1, delta=MOST)).execute()
        groups, last = tuple(states[0]), versions - 1
        cases = {
            "all of a whole version": (root / WHOLE, last, groups),
            "all of a difference to one": (root / ROW, last, groups),
            "weights of a whole version": (root / WHOLE, last - 1, groups[:1]),
            "weights of a whole one, thinned": (root / CHAIN, 0, groups[:1]),
            f"weights at the end of {MOST} differences": (root / CHAIN, last - 1, groups[:1]),
        }
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in cases}
        for _ in range(rounds + 1):
            for name, (where_to, number, wanted) in cases.items():
                found[name].append(restored(where_to, number, states[number], wanted))
        results["raw"] = {"all": nbytes(states[0]), "weights": nbytes({"weights": states[0]["weights"]})}
    results["restores"] = {
        name: {"seconds": statistics.median(s for s, _ in times[1:]), "all": [s for s, _ in times], "read": times[0][1]}
        for name, times in found.items()
    }
    shown = Table(title=f"{results['raw']['all'] / 1e6:.0f} MB, of which weights {results['raw']['weights'] / 1e6:.0f}")
    for column in ("", "s", "MB read"):
        shown.add_column(column, justify="right" if column else "left")
    for name, row in results["restores"].items():
        shown.add_row(name, f"{row['seconds']:.3f}", f"{row['read'] / 1e6:.1f}")
    console.print(shown)
    file = out / f"chain_restore-{results['date'][:10]}.json"
    file.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"written to {file}")


if __name__ == "__main__":
    typer.run(main)
