"""How fast a training state comes back onto one GPU: raystow beside torch.load, DCP and torch_checkpointing, in one run.

The state of ``gpu_workload``, 6.17 GB really trained, is saved once by each contestant to memory (/dev/shm), and loaded into the
tensors on the GPU, several times. Rates are of raw bytes. raystow comes with what its GPU coders write (deflate, ans), and with
what its node worker writes on the CPU (zstd).

How it is measured. Before each load the tensors are filled with zeros; the clock runs from one synchronization of the GPU to the
next, around the load; afterwards, outside it, every tensor is compared bit for bit with a copy on the GPU. The first load, which
compiles kernels and makes pinned memory, is told apart: it is not among the rounds.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from gpu_coders import WORDS
from gpu_contestants import PEERS, Contestant, field, ours, start_ray
from gpu_save import clear, console_for_tables, leave, report, style, table_of
from gpu_workload import Size, State, Training, about, device_named, nbytes, tensors_of
from rich.table import Table

CODECS = ("deflate", "ans", "cpu")


def measure(training: Training, contestant: Contestant, kept: State, rounds: int) -> dict[str, Any]:
    """One save, and the seconds of every load. ``SystemExit`` if a bit is not what it was."""
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
    """Seconds of one load."""
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
    """Every bit as it was."""
    for group, tensors in state.items():
        for name, tensor in tensors.items():
            words = WORDS[tensor.element_size()]
            if not torch.equal(tensor.view(words), kept[group][name].view(words)):
                raise SystemExit(f"{group}.{name} did not come back as it was saved")


def tables(results: dict[str, Any]) -> Iterator[Table]:
    """One table of all contestants."""
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
    """What raystow promises, and whether this run bears it out; None where it did not measure that."""
    rates = {name: row["GB/s"] for name, row in results["contestants"].items() if "GB/s" in row}
    best = max((rates[name] for name in PEERS if name in rates), default=None)
    held: dict[str, bool | None] = {}
    for name in map(ours, CODECS):
        rate = rates.get(name)
        held[f"{name} loads at least 20 GB/s"] = None if rate is None else rate >= 20
        held[f"{name} loads at least 5 times as fast as the best peer"] = None if not (rate and best) else rate >= 5 * best
    return held


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    store: Annotated[Path, typer.Option(help="folder for the checkpoints; what was made in it is deleted")] = Path("/dev/shm"),
    contestant: Annotated[list[str] | None, typer.Option(help="only these (repeatable); all by default")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="loads that count")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="training steps before the state is saved")] = 400,
    memory: Annotated[float | None, typer.Option(help="GiB that raystow may take; its own default otherwise")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try it out")] = "cuda",
    layers: Annotated[int, typer.Option(help="of the model")] = Size.layers,
    width: Annotated[int, typer.Option(help="of the model, a multiple of 64")] = Size.width,
    batch: Annotated[int, typer.Option(help="sequences in a micro-batch")] = Size.batch,
) -> None:
    """Measure how fast a training state is restored."""
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
        makers = field(root, CODECS, int(memory * (1 << 30)) if memory else None)
        for name in contestant or makers:
            try:
                results["contestants"][name] = row = measure(training, makers[name](), kept, rounds)
                console.print(f"{name}: {row['GB/s']:.2f} GB/s", highlight=False)
            except Exception as error:  # a peer that is not there or fails is no reason to lose the others
                reason = f"{type(error).__name__}: {error}"
                results["contestants"][name] = {"skipped": reason}
                console.print(f"{name} is skipped: {reason[:500]}", highlight=False, markup=False)
            for tensor, original in zip(tensors_of(training.state()), tensors_of(kept), strict=True):
                tensor.copy_(original)  # whatever a failed load has left
            clear(root)
            results["claims"] = claims(results)
            file.write_text(json.dumps(results, indent=1) + "\n")
    report(console, tables(results), results["claims"], file)
    leave()


if __name__ == "__main__":
    typer.run(main)
