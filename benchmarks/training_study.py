"""Measure the size reduction of each compression option on a real training, and its effect on training that is resumed.

Three models are trained on real text (see ``study_models``): a GPT, a GPT with experts, and the first one, frozen, with adapters.
States are encoded by the CPU coder in each way: complete, with derived tensors, as deltas to the version 10 and 100 steps before,
rounded by each profile, and as weights alone, with all bits and with four mantissa bits. Training is resumed from one state in
each way, and its loss is compared with the uninterrupted run. Runs that differ only in the order of the text show which
difference is significant.

The learning rate rises for 100 steps and then falls along a cosine; the gain of deltas depends on it. Two states are also saved
by a ``Checkpointer`` from the device on which they were trained, because a GPU has its own coder. Sizes are of packs, without
manifests. ``pictures`` draws the curves of a finished study.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import ray
import report
import torch
import typer
from gpu_workload import Size, State, about, corpus, device_named, nbytes
from rich.console import Console
from rich.table import Table
from study_models import Run, copied, deterministic, gpt, lora, moe

import raystow
from raystow.orchestrator.lossy.profiles import PROFILES, Lossy
from raystow.orchestrator.lossy.rounded_chunk import round_in_place
from raystow.storage.coding import chunk as chunks
from raystow.storage.coding import delta, dtypes
from raystow.storage.coding.derived import followed
from raystow.storage.coding.nearest import round_to_nearest

_CHUNK = 4 << 20  # bytes
_NEAR, _FAR = 10, 100  # steps between versions
_BITS = 4  # mantissa bits of old weights
_local = threading.local()

Arrays = dict[str, tuple[str, np.ndarray[Any, Any]]]
"""Name -> dtype and bytes of a tensor."""


def rounded(state: State, profile: str) -> State:
    """Return a copy of a state, as a save with this profile stores it."""
    lossy, made = Lossy.of(profile), copied(state)
    for group, tensors in made.items():
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            if (rule := lossy.selector(f"{group}.{name}", dtype, tensor.shape)) is not None:
                round_in_place(rule, tensor)
    return made


def coarse(weights: Mapping[str, torch.Tensor], bits: int = _BITS) -> dict[str, torch.Tensor]:
    """Return a copy of weights, as a version thinned to this number of mantissa bits stores them."""
    made = {name: tensor.cpu().clone() for name, tensor in weights.items()}
    for tensor in made.values():
        if tensor.dim() > 1:
            round_to_nearest(tensor.view(-1).view(torch.uint8).numpy(), str(tensor.dtype).removeprefix("torch."), bits)
    return made


def arrays(state: State, groups: Iterable[str]) -> Arrays:
    """Return the arrays to be coded."""
    return {
        f"{group}.{name}": (str(tensor.dtype).removeprefix("torch."), tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        for group in groups
        for name, tensor in state[group].items()
    }


def stored(state: Arrays, base: Arrays | None = None, *, derive: bool = True) -> int:
    """Return bytes in packs. ``base``: the earlier version, if chunks may be deltas to it."""
    jobs = [(name, start) for name, (_, raw) in state.items() for start in range(0, raw.size, _CHUNK)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return sum(pool.map(lambda job: _stored(job[0], job[1], state, base, derive), jobs))


def _stored(name: str, start: int, state: Arrays, base: Arrays | None, derive: bool) -> int:
    dtype, whole = state[name]
    raw = whole[start : start + _CHUNK]
    master = state.get(name.replace("weights.", "master.", 1)) if derive and name.startswith("weights.") else None
    if master is not None:
        scale = dtypes.dtype(master[0]).itemsize // dtypes.dtype(dtype).itemsize
        words = master[1][scale * start : scale * (start + raw.size)]
        if followed(raw, words, master[0], dtype) is not None:
            return 0
    if not hasattr(_local, "encoder"):
        _local.encoder = chunks.ChunkEncoder(_CHUNK)
    if base is not None:
        found = delta.encode(_local.encoder, raw, dtypes.dtype(dtype), base[name][1][start : start + _CHUNK].copy(), 1)
        if found is not None:
            return found[1].size
    return int(_local.encoder.encode(raw, dtypes.dtype(dtype))[1].size)


def sizes(state: State, near: State, far: State) -> dict[str, int]:
    """Return the stored bytes of a state in every way; ``near`` and ``far``: earlier states of the same training."""
    groups = tuple(state)
    whole, weights = arrays(state, groups), arrays(state, ("weights",))
    few, few_near = (arrays({"weights": coarse(one["weights"])}, ("weights",)) for one in (state, near))
    found = {
        "raw": nbytes(state),
        "in full": stored(whole, derive=False),
        "derived": stored(whole),
        "weights alone": stored(weights),
        f"weights alone, {_BITS} bits": stored(few),
        f"weights alone, {_BITS} bits, difference, {_NEAR} steps": stored(few, few_near),
    }
    for steps, before in ((_NEAR, near), (_FAR, far)):
        found[f"difference, {steps} steps"] = stored(whole, arrays(before, groups))
        found[f"weights alone, difference, {steps} steps"] = stored(weights, arrays(before, ("weights",)))
    for profile in PROFILES:
        small = arrays(rounded(state, profile), groups)
        found[profile] = stored(small)
        found[f"{profile}, difference, {_NEAR} steps"] = stored(small, arrays(rounded(near, profile), groups))
    return found


def saved(near: State, state: State, there: State) -> dict[str, int]:
    """Return the stored bytes of two states that are saved one after the other from the same tensors ``there``: the first is
    whole, the second is a delta to the first."""
    with (
        tempfile.TemporaryDirectory() as root,
        raystow.Checkpointer(
            root, rank=0, world_size=1, compression=raystow.Compression("deflate", delta=1), replication=raystow.Replication(0)
        ) as checkpointer,
    ):
        for step, one in enumerate((near, state)):
            for group, tensors in one.items():
                for name, tensor in tensors.items():
                    there[group][name].copy_(tensor)
            checkpointer.save(there, step=step).result(600)
        whole, difference = (version.bytes for version in raystow.open(root).versions())
    return {"derived, saved": whole, f"difference, {_NEAR} steps, saved": difference}


def losses(run: Run, steps: int) -> list[float]:
    """Return the loss of each step."""
    found: list[float] = torch.stack(list(run.train(steps))).tolist()
    return found


def study(run: Run, steps: int, resume_at: int, say: Any) -> dict[str, Any]:
    """Train ``run`` to the end and measure sizes; then resume at ``resume_at`` from each kind of state."""
    found: dict[str, Any] = {"sizes": {}, "resumed": {}}
    curve: list[float] = []
    for target in (steps // 4, steps // 2, resume_at):
        kept: dict[int, State] = {}
        for at in (target - _FAR, target - _NEAR, target):
            curve += losses(run, at - run.step)
            kept[at] = copied(run.state())
        found["sizes"][target] = sizes(kept[target], kept[target - _NEAR], kept[target - _FAR])
        there = {group: {name: t.clone() for name, t in tensors.items()} for group, tensors in run.state().items()}
        found["sizes"][target] |= saved(kept[target - _NEAR], kept[target], there)
        del there
    middle = kept[resume_at]
    found["evaluated"] = {"as it was": run.evaluate()}
    curve += losses(run, steps - run.step)
    found["loss"], found["end"] = curve, run.evaluate()
    say(f"  trained: {curve[0]:.3f} to {curve[-1]:.3f}, evaluated {found['end']:.4f}")
    ways: dict[str, tuple[State, bool]] = {"without loss": (middle, True)}
    ways |= {profile: (rounded(middle, profile), True) for profile in PROFILES}
    ways["weights alone"] = (middle, False)
    ways[f"weights alone, {_BITS} bits"] = ({**middle, "weights": coarse(middle["weights"])}, False)
    for name, (state, optimizer) in ways.items():
        run.load(state, resume_at, optimizer=optimizer)
        found["evaluated"][name] = run.evaluate()
        again = losses(run, steps - resume_at)
        found["resumed"][name] = {"loss": again, "end": run.evaluate(), "same bits": again == curve[resume_at:]}
        say(f"  resumed {name}: {found['resumed'][name]['end']:.4f}, same bits: {found['resumed'][name]['same bits']}")
    seed, found["other orders"] = run.seed, []
    for other in (1, 2, 3):
        run.load(middle, resume_at)
        run.seed = seed + other
        losses(run, steps - resume_at)
        found["other orders"].append(run.evaluate())
    run.seed = seed
    say(f"  other orders of the text: {', '.join(f'{end:.4f}' for end in found['other orders'])}")
    return found


def tables(results: dict[str, Any]) -> Iterator[Table]:
    """Yield sizes and losses of each model."""
    for model, found in results["models"].items():
        table = Table(title=f"{model}: stored / raw")
        table.add_column("")
        for step in found["sizes"]:
            table.add_column(f"step {step}", justify="right")
        for way in next(iter(found["sizes"].values())):
            if way != "raw":
                table.add_row(way, *(f"{of[way] / of['raw']:.3f}" for of in found["sizes"].values()))
        yield table
        spread = [found["end"], *found["other orders"]]
        table = Table(title=f"{model}: undisturbed {found['end']:.4f}; other orders {min(spread):.4f} to {max(spread):.4f}")
        for column in ("resumed", "evaluated at once", "at the end", "difference", "within the spread"):
            table.add_column(column, justify="right")
        for way, of in found["resumed"].items():
            inside = abs(of["end"] - found["end"]) <= max(spread) - min(spread)
            table.add_row(
                way,
                f"{found['evaluated'][way]:.4f}",
                f"{of['end']:.4f}",
                f"{of['end'] - found['end']:+.4f}",
                "yes" if inside else "no",
            )
        yield table


def pictures(
    file: Annotated[Path, typer.Argument(help="result file of a study")],
    folder: Annotated[Path, typer.Option(help="folder for the pictures")] = Path("docs/images"),
) -> None:
    """Draw the loss curves of a study, resumed and uninterrupted."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "raystow"
    from matplotlib import pyplot

    results = json.loads(file.read_text())
    models = results["models"]
    figure, axes = pyplot.subplots(1, len(models), figsize=(3.5 + 3.5 * len(models), 3.4), layout="constrained", squeeze=False)
    for axis, (model, found) in zip(axes[0], models.items(), strict=True):
        at, end = results["settings"]["resume at"][model], len(found["loss"])
        steps = np.arange(at, end)
        for way, of in found["resumed"].items():
            if way != "without loss":
                difference = np.array(of["loss"]) - np.array(found["loss"][at:])
                axis.plot(steps[4:-4], np.convolve(difference, np.full(9, 1 / 9), "valid"), label=way, linewidth=0.8)
        axis.axhline(0, color="black", linewidth=0.6)
        axis.set(title=model, xlabel="step", ylabel="loss above the undisturbed run's,\nmean of 9 steps")
        axis.set_yscale("symlog", linthresh=0.001)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "training-study.svg", metadata={"Date": None})


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    steps: Annotated[int, typer.Option(min=500, help="steps of the GPT; the others train for half")] = 2000,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a trial")] = "cuda",
    layers: Annotated[int, typer.Option(help="of the models")] = 8,
    width: Annotated[int, typer.Option(help="of the models, a multiple of 64")] = 512,
    batch: Annotated[int, typer.Option(help="sequences in a batch")] = 16,
    only: Annotated[list[str] | None, typer.Option(help="model to train (repeatable); default: all")] = None,
    rate: Annotated[float, typer.Option(help="highest learning rate; adapters have their own")] = 3e-4,
    constant: Annotated[bool, typer.Option("--constant", help="use a constant learning rate")] = False,
) -> None:
    """Train, save with each option, resume, and compare."""
    lengths = {"GPT": steps, "experts": steps // 2, "adapters": steps // 2}
    names = report.chosen(only, lengths)
    where, console, size = device_named(device), Console(width=110), Size(layers=layers, width=width, batch=batch, context=256)
    deterministic()
    begin = time.perf_counter()
    settings = {"steps": steps, "size": vars(size), "rate": rate, "constant": constant, "resume at": {}}
    results: dict[str, Any] = {**about(where), "settings": settings, "models": {}}
    file = out / f"training_study-{results['date'][:10]}.json"
    text = corpus(size, where)
    ray.init("local", num_cpus=os.cpu_count(), log_to_driver=False, include_dashboard=False)
    base: torch.nn.Module | None = None
    for name, length in lengths.items():
        if name not in names:
            continue
        torch.manual_seed(0)
        if name == "adapters" and base is None:
            console.print(f"a GPT to adapt, {steps} steps")
            first = Run(gpt(size), text, size, seed=1, lr=rate, steps=None if constant else steps)
            losses(first, steps)
            base = first.model
        model = gpt(size) if name == "GPT" else moe(size) if name == "experts" else lora(base)
        resume_at = length * 3 // 4
        console.print(f"{name}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {length} steps")
        lr, falling = 1e-3 if name == "adapters" else rate, None if constant else length
        run = Run(model, text, size, seed=1, lr=lr, steps=falling)
        results["settings"]["resume at"][name] = resume_at
        results["models"][name] = study(run, length, resume_at, console.print)
        base = run.model if name == "GPT" else base
        results["seconds"] = time.perf_counter() - begin
        file.write_text(json.dumps(results) + "\n")
    for table in tables(results):
        console.print(table)
    console.print(f"{results['seconds']:.0f} s; written to {file}")


if __name__ == "__main__":
    app = typer.Typer()
    app.command("run")(main)
    app.command()(pictures)
    app()
