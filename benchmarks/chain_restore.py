"""Measure the restore of versions that are stored as deltas, compared with whole ones.

A GPT (see ``study_models``) is trained in mixed precision and saved every 10 steps to two repositories: one with whole
versions, one in which all but the first are deltas to the first (``Compression(delta=)``). A copy of the first repository is
thinned to a chain, as ``raystow prune --resumable 1 --delta 6`` does. The versions are then restored into host memory in turn:
open, plan, read, decode. All files are in the page cache. Every tensor is compared bit for bit with the saved one.
"""

from __future__ import annotations

import logging
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import ray
import report
import torch
import typer
from gpu_workload import Size, State, about, corpus, device_named, nbytes
from report import table_of
from rich.console import Console
from study_models import Run, copied, gpt

import raystow
from raystow.orchestrator.restore.name_patterns import ANY_NAMES
from raystow.orchestrator.restore.planner import RestoreOptions, plan_restore
from raystow.storage.retention.thin_policy import MOST

WHOLE, ROW, CHAIN = "whole", "row", "chain"


def saved(run: Run, root: Path, versions: int, every: int) -> list[dict[str, dict[str, Any]]]:
    """Train and save to both repositories; return each version's state in host memory."""
    found = []
    alone: dict[str, Any] = {"rank": 0, "world_size": 1, "replication": raystow.Replication(0)}
    with (
        raystow.Checkpointer(str(root / WHOLE), memory=raystow.Memory(cache=0), **alone) as whole,
        raystow.Checkpointer(str(root / ROW), compression=raystow.Compression(delta=versions), **alone) as row,
    ):
        for _ in range(versions):
            list(run.train(every))
            for checkpointer in (whole, row):
                checkpointer.save(run.state(), step=run.step).result(600)
            found.append(copied(run.state()))
    return found


def restored(folder: Path, number: int, kept: State, groups: tuple[str, ...]) -> tuple[float, int]:
    """Restore these groups of a version; return seconds and bytes read."""
    into = {group: {name: torch.zeros_like(tensor) for name, tensor in kept[group].items()} for group in groups}
    begin = time.perf_counter()
    version = raystow.open(str(folder)).versions()[number]
    version.restore(into, strict=False)
    seconds = time.perf_counter() - begin
    for group, tensors in into.items():
        for name, tensor in tensors.items():
            if not torch.equal(tensor.view(torch.uint8), kept[group][name].view(torch.uint8)):
                raise SystemExit(f"{folder.name}: {group}.{name} is not what was saved")
    return seconds, plan_restore(version, into, RestoreOptions(names=ANY_NAMES)).nbytes


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
    """Train, save, thin, and restore in turns."""
    where, console = device_named(device), Console(width=110)
    size = Size(layers=layers, width=width, batch=batch, context=128, vocabulary=4000)
    logging.getLogger("raystow").setLevel(logging.ERROR)  # no warnings about tensors that are left out on purpose
    torch.manual_seed(0)
    versions = MOST + 2  # the newest, a whole one, and the longest chain of deltas
    run = Run(gpt(size), corpus(size, where), size, seed=1)
    list(run.train(warm_up))
    results: dict[str, Any] = {**about(where), "settings": {"rounds": rounds, "every": every, "size": vars(size)}}
    ray.init("local", num_cpus=os.cpu_count(), log_to_driver=False, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        states = saved(run, root, versions, every)
        ray.shutdown()
        shutil.copytree(root / WHOLE, root / CHAIN, copy_function=os.link)  # safe: files are replaced, never changed
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
            for name, (where_to, number, selected) in cases.items():
                found[name].append(restored(where_to, number, states[number], selected))
        results["raw"] = {"all": nbytes(states[0]), "weights": nbytes({"weights": states[0]["weights"]})}
    results["restores"] = {
        name: {"seconds": statistics.median(s for s, _ in times[1:]), "all": [s for s, _ in times], "read": times[0][1]}
        for name, times in found.items()
    }
    sizes = results["raw"]
    shown = table_of(f"{sizes['all'] / 1e6:.0f} MB, of which weights {sizes['weights'] / 1e6:.0f}", "s", "MB read")
    for name, row in results["restores"].items():
        shown.add_row(name, f"{row['seconds']:.3f}", f"{row['read'] / 1e6:.1f}")
    report.show(console, [shown], {})
    report.write(console, out, "chain_restore", results)


if __name__ == "__main__":
    typer.run(main)
