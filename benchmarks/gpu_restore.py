"""Measure the restore of a training state onto one GPU: raystow, torch.load, DCP and torch_checkpointing in one run.

Each contestant saves the state of ``gpu_workload`` (6.17 GB) once to /dev/shm and loads it several times into the tensors on
the GPU. Rates are of raw bytes. raystow restores what its GPU coders write (deflate, ans) and what its node worker writes
(zstd); and from the memory of its node in the training process that has saved, by its Checkpointer and by a second one.

Method. Before each load the training takes two steps, and the tensors are set to zero. The clock runs between synchronizations
of the GPU. Afterwards every tensor is compared bit for bit with a copy on the GPU. The first load, which compiles kernels and
pins memory, is reported separately.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import report
import torch
import typer
from gpu_coders import WORDS
from gpu_contestants import MEMORY, PEERS, SECOND, Contestant, field, of_node_memory, ours, start_ray
from gpu_save import clear, console_for_tables, style
from gpu_workload import Size, State, Training, about, device_named, nbytes, tensors_of
from report import table_of
from rich.table import Table

CODECS = ("deflate", "ans", "cpu")


def measure(training: Training, contestant: Contestant, kept: State, rounds: int) -> dict[str, Any]:
    """Save once and time every load. Raises ``SystemExit`` if a bit differs."""
    into = training.state()
    try:
        wait = contestant.save(into, training.step)
        contestant.fence()
        wait()
        times = [load(training, contestant, into, kept) for _ in range(rounds + 1)]
        stored = contestant.stored()
    finally:
        contestant.close()
    gigabytes = nbytes(kept) / 1e9
    return {
        "GB/s": gigabytes / statistics.median(times[1:]),
        "slowest GB/s": gigabytes / max(times[1:]),
        "first GB/s": gigabytes / times[0],
        "ratio": stored / nbytes(kept),
        "seconds": times,
    }


def load(training: Training, contestant: Contestant, into: State, kept: State) -> float:
    """Load once; return seconds."""
    training.run(2)
    for tensor in tensors_of(into):
        tensor.zero_()
    training.synchronize()
    start = time.perf_counter()
    contestant.load(into)
    training.synchronize()
    seconds = time.perf_counter() - start
    check(into, kept)
    return seconds


def check(state: State, kept: State) -> None:
    """End the run if a bit differs."""
    for group, tensors in state.items():
        for name, tensor in tensors.items():
            words = WORDS[tensor.element_size()]
            if not torch.equal(tensor.view(words), kept[group][name].view(words)):
                raise SystemExit(f"{group}.{name} did not come back as it was saved")


def tables(results: dict[str, Any]) -> Iterator[Table]:
    """Yield a table of all contestants."""
    table = table_of(
        f"loading {results['state']['bytes'] / 1e9:.2f} GB into GPU tensors", "GB/s", "slowest", "first load", "stored"
    )
    for name, row in results["contestants"].items():
        if "skipped" in row:
            table.add_row(name, "skipped", style="dim")
        else:
            speeds = [f"{row[what]:.2f}" for what in ("GB/s", "slowest GB/s", "first GB/s")]
            table.add_row(name, *speeds, f"{row['ratio']:.4f}", style=style(name))
    yield table


def claims(results: dict[str, Any]) -> dict[str, bool | None]:
    """Return raystow's goals and whether this run meets them; None: not measured."""
    rates = {name: row["GB/s"] for name, row in results["contestants"].items() if "GB/s" in row}
    best = max((rates[name] for name in PEERS if name in rates), default=None)
    held: dict[str, bool | None] = {}
    for name in map(ours, CODECS):
        rate = rates.get(name)
        held[f"{name} loads at least 20 GB/s"] = None if rate is None else rate >= 20
        held[f"{name} loads at least 5 times as fast as the best peer"] = None if not (rate and best) else rate >= 5 * best
    store = rates.get(ours(CODECS[0]))
    for name in (MEMORY, SECOND):
        rate = rates.get(name)
        held[f"{name}: at least the rate from the store, and 20 GB/s"] = (
            None if not (rate and store) else rate >= max(20, 0.95 * store)
        )
    return held


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    store: Annotated[Path, typer.Option(help="parent folder of the checkpoints, deleted at the end")] = Path("/dev/shm"),
    contestant: Annotated[list[str] | None, typer.Option(help="contestant to measure (repeatable); default: all")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="measured loads")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="training steps before the state is saved")] = 400,
    memory: Annotated[float | None, typer.Option(help="GiB of raystow's staging memory; default: raystow's own")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a trial")] = "cuda",
    layers: Annotated[int, typer.Option(help="of the model")] = Size.layers,
    width: Annotated[int, typer.Option(help="of the model, a multiple of 64")] = Size.width,
    batch: Annotated[int, typer.Option(help="sequences in a micro-batch")] = Size.batch,
) -> None:
    """Measure how fast a training state is restored."""
    names = report.chosen(contestant, {**field(Path(), CODECS, None), **of_node_memory(Path(), CODECS[0], None)})
    where = device_named(device)
    console = console_for_tables()
    settings = {"rounds": rounds, "steps": steps, "memory GiB": memory, "layers": layers, "width": width}
    results: dict[str, Any] = {**about(where), "settings": settings, "contestants": {}}
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"gpu_restore-{results['date'][:10]}.json"

    start_ray()
    training = Training(Size(layers=layers, width=width, batch=batch), where)
    training.run(steps)
    kept = {group: {name: tensor.clone() for name, tensor in of.items()} for group, of in training.state().items()}
    results["state"] = {"bytes": nbytes(kept)}
    console.print(f"{results['machine']['gpu']['name']}, {results['date']}: {nbytes(kept) / 1e9:.2f} GB")

    with tempfile.TemporaryDirectory(prefix="raystow-gpu-restore-", dir=store) as folder:
        root = Path(folder)
        limit = int(memory * (1 << 30)) if memory else None
        makers = {**field(root, CODECS, limit), **of_node_memory(root, CODECS[0], limit)}
        for name in names:
            try:
                results["contestants"][name] = row = measure(training, makers[name](), kept, rounds)
                console.print(f"{name}: {row['GB/s']:.2f} GB/s", highlight=False)
            except Exception as error:  # a peer that is missing or fails must not end the run
                reason = f"{type(error).__name__}: {error}"
                results["contestants"][name] = {"skipped": reason}
                console.print(f"{name} is skipped: {reason[:500]}", highlight=False, markup=False)
            for tensor, original in zip(tensors_of(training.state()), tensors_of(kept), strict=True):
                tensor.copy_(original)  # a failed load may have left other values
            clear(root)
            results["claims"] = claims(results)
            file.write_text(json.dumps(results, indent=1) + "\n")
    report.show(console, tables(results), results["claims"])
    console.print(f"written to {file}")
    report.leave()


if __name__ == "__main__":
    typer.run(main)
