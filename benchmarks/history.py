"""Measure the size of a history of a hundred versions, complete and thinned.

A GPT (see ``study_models``) is trained on real text in mixed precision, 14 bytes per parameter, and saved every 10 steps
through a ``Checkpointer`` on a Ray cluster of this machine, after a warm-up. The repository is copied for each way of thinning,
thinned as by ``raystow prune``, and collected. Every version's weights are restored and compared with a digest taken at save
time, of all bits or of the rounded values; the loss of every tenth version is measured on held-out text. Sizes are of packs.
Sizes without derived tensors, and as resumable deltas, are computed. The learning rate falls along a cosine from the first step
to the last version.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import ray
import torch
import typer
from gpu_workload import Size, about, corpus, device_named, nbytes
from rich.console import Console
from rich.table import Table
from study_models import Run, copied, deterministic, gpt
from training_study import arrays, coarse, stored

import raystow
from raystow.orchestrator.restore.name_patterns import ANY_NAMES, STRICT
from raystow.orchestrator.restore.planner import RestoreOptions, plan_restore
from raystow.storage.retention.thin_policy import MOST

WAYS = {
    "weights alone, the last 2 resumable": raystow.Policy(resumable=2),
    "differences, the last 2 resumable": raystow.Policy(resumable=2, delta=MOST),
    "differences, the last resumable": raystow.Policy(resumable=1, delta=MOST),
    "4 bits of mantissa, differences, the last 2 resumable": raystow.Policy(resumable=2, delta=MOST, mantissa_bits=4),
    "4 bits of mantissa, differences, the last resumable": raystow.Policy(resumable=1, delta=MOST, mantissa_bits=4),
}
LOOKED_AT = 10
"""One in this number of versions is evaluated."""


Digests = dict[int | None, list[str]]
"""Kept mantissa bits (None: all) -> digest of the weights of each version."""


def digest(weights: dict[str, torch.Tensor]) -> str:
    """Return a digest of all bits."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(weights.items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def saved(run: Run, uri: str, saves: int, every: int, console: Console) -> tuple[Digests, int]:
    """Train and save; return the digests, and the bytes of all versions as deltas to the previous one."""
    found: Digests = {policy.mantissa_bits: [] for policy in WAYS.values()}
    counted, before = 0, None
    with raystow.Checkpointer(
        uri, rank=0, world_size=1, memory=raystow.Memory(cache=0), replication=raystow.Replication(0)
    ) as checkpointer:
        for number in range(saves):
            losses = list(run.train(every))
            checkpointer.save(run.state(), step=run.step).result(600)
            state = copied(run.state())
            for bits, digests in found.items():
                digests.append(digest(state["weights"] if bits is None else coarse(state["weights"], bits)))
            now = arrays(state, tuple(state))
            counted, before = counted + stored(now, before), now
            if number % 10 == 9:
                console.print(f"  step {run.step}: loss {losses[-1].item():.3f}")
    return found, counted


def evaluated(run: Run, weights: dict[str, torch.Tensor]) -> float:
    """Return the loss with these weights on held-out text."""
    with torch.no_grad():
        for name, tensor in run.state()["weights"].items():
            tensor.copy_(weights[name])
    return run.evaluate()


def thinned(folder: Path, policy: raystow.Policy, digests: list[str], run: Run) -> dict[str, Any]:
    """Thin, collect, restore, compare and evaluate; return sizes and durations."""
    repository = raystow.open(str(folder))
    begin = time.perf_counter()
    repository.plan_retention(policy).execute()
    seconds = time.perf_counter() - begin
    repository.plan_collection(grace=0.0).execute()
    versions, most, losses = repository.versions(), 0, []
    for version, one in zip(versions, digests, strict=True):
        into = {name: version.read(name).zero_() for name in version.tensors() if name.startswith("weights.")}
        plan = plan_restore(version, into, RestoreOptions(names=STRICT if not version.resumable else ANY_NAMES))
        version.restore(into, strict=not version.resumable)
        weights = {name.removeprefix("weights."): tensor for name, tensor in into.items()}
        if digest(weights if policy.mantissa_bits is None or not version.resumable else coarse(weights)) != one:
            raise SystemExit(f"{folder}: the weights of version {version.id} are not those that were saved")
        if version.id % LOOKED_AT == 0:
            losses.append(evaluated(run, weights))
        most = max(most, 0 if version.resumable else plan.nbytes)
    sizes = [version.bytes for version in versions]
    return {"stored": sum(sizes), "sizes": sizes, "thinning seconds": seconds, "most read for one": most, "loss": losses}


def table(results: dict[str, Any]) -> Table:
    """Return the table of all ways of thinning: sizes relative to the raw bytes and to the full history, and the mean and
    maximum difference of the loss of restored weights."""
    raw, whole = results["raw"], results["ways"]["in full"]["stored"]
    shown = Table(title=f"{results['settings']['saves']} versions")
    exact = next(iter(WAYS))
    for column in ("", "MB", "of raw", "raw is", "in full is", "loss is off"):
        shown.add_column(column, justify="right" if column else "left")
    for way, of in results["ways"].items():
        size = of["stored"]
        off = [a - b for a, b in zip(of.get("loss", []), results["ways"][exact]["loss"], strict=False)]
        told = f"{sum(off) / len(off):+.5f}, {max(off, key=abs):+.5f}" if off else ""
        shown.add_row(way, f"{size / 1e6:.1f}", f"{size / raw:.4f}", f"{raw / size:.2f} times", f"{whole / size:.2f} times", told)
    return shown


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    saves: Annotated[int, typer.Option(min=4, help="versions")] = 100,
    every: Annotated[int, typer.Option(min=1, help="steps between them")] = 10,
    warm_up: Annotated[int, typer.Option(min=0, help="steps before the first")] = 150,
    device: Annotated[str, typer.Option(help="cpu, or cuda for a larger model")] = "cpu",
    layers: Annotated[int, typer.Option(help="of the model")] = 2,
    width: Annotated[int, typer.Option(help="of the model, a multiple of 64")] = 128,
    batch: Annotated[int, typer.Option(help="sequences in a batch")] = 2,
    vocabulary: Annotated[int, typer.Option(help="of the tokenizer")] = 2000,
    rate: Annotated[float, typer.Option(help="highest learning rate")] = 3e-4,
    constant: Annotated[bool, typer.Option("--constant", help="use a constant learning rate")] = False,
) -> None:
    """Train, save, thin, restore and compare."""
    where, console = device_named(device), Console(width=110)
    size = Size(layers=layers, width=width, batch=batch, context=128, vocabulary=vocabulary)
    logging.getLogger("raystow").setLevel(logging.ERROR)  # no warnings about tensors that are left out on purpose
    deterministic()
    torch.manual_seed(0)
    settings = {"saves": saves, "every": every, "warm up": warm_up, "rate": rate, "constant": constant, "size": vars(size)}
    results: dict[str, Any] = {**about(where), "settings": settings, "ways": {}}
    falling = None if constant else warm_up + saves * every
    run = Run(gpt(size), corpus(size, where), size, seed=1, lr=rate, steps=falling)
    console.print(f"{sum(p.numel() for p in run.model.parameters()) / 1e6:.1f} M parameters")
    list(run.train(warm_up))
    ray.init("local", num_cpus=os.cpu_count(), log_to_driver=False, include_dashboard=False)
    with tempfile.TemporaryDirectory() as root:
        first = Path(root) / "run"
        digests, counted = saved(run, str(first), saves, every, console)
        ray.shutdown()
        sizes = [version.bytes for version in raystow.open(str(first)).versions()]
        state = copied(run.state())
        results["raw"] = saves * nbytes(state)
        results["ways"]["in full, nothing derived (counted)"] = {
            "stored": saves * stored(arrays(state, tuple(state)), derive=False)
        }
        results["ways"]["in full"] = {"stored": sum(sizes), "sizes": sizes}
        results["ways"]["differences, all resumable (counted)"] = {"stored": counted}
        for number, (way, policy) in enumerate(WAYS.items()):
            folder = Path(root) / str(number)
            shutil.copytree(first, folder, copy_function=os.link)  # safe: files are replaced, never changed
            results["ways"][way] = thinned(folder, policy, digests[policy.mantissa_bits], run)
    file = out / f"history-{results['date'][:10]}.json"
    file.write_text(json.dumps(results) + "\n")
    console.print(table(results))
    console.print(f"written to {file}")


if __name__ == "__main__":
    typer.run(main)
