"""Measure the cost of the step journal for a training loop on one GPU, the size of entries, and the duration of a replay.

The training of ``gpu_workload`` (6.17 GB of state) runs on a Ray cluster of two nodes on this machine: the training's node
worker, and a partner that keeps a copy of each entry. Windows of steps that are recorded alternate with windows that are not, and
each is compared with the mean of its two neighbors, because clocks drift. Every step ends with a synchronization of the GPU.
The nodes' memory for entries is small, so that it is used again and again as in a long training: virtual machines may give memory
slowly when it is used first.

Peers are measured in the same way, in the same run: a version in every step, by raystow and by torch_checkpointing. The last row
of the table is the journal with one version in ``VERSIONS`` steps.

Before the windows, steps are recorded after a version; the version is restored, and the steps are replayed: the result must have
the same bits. ``--device cpu`` with a small model only tests the benchmark; its figures have no meaning.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import ray
import report
import torch
import typer
from gpu_contestants import TORCH_CHECKPOINTING, Contestant, field, ours, size
from gpu_workload import Size, Training, about, device_named, nbytes, tensors_of
from ray.cluster_utils import Cluster
from report import table_of
from rich.console import Console
from rich.table import Table

import raystow
from raystow.orchestrator.coordinator.ray_client import RayCoordinatorClient
from raystow.workers.node.actor import NAMESPACE, node_actor

SHORT, LONG = 1, 8
VERSIONS = 100  # steps between versions with a journal
SAVES, FIRST = 6, 2  # steps of a window with a save in each, and first steps that are ignored, since no earlier save is in flight
now = time.perf_counter


def start_cluster(gpus: int) -> Cluster:
    """Start a node for the training and one for its partner, and connect this process to the first."""
    options = {"include_dashboard": False, "object_store_memory": 200 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": os.cpu_count() or 1, "num_gpus": gpus, **options})
    cluster.add_node(num_cpus=1, resources={"partner": 1}, object_store_memory=200 << 20)
    ray.init(address=cluster.address, log_to_driver=False)
    ray.get(ray.remote(start_node_worker).options(resources={"partner": 1}, num_cpus=0).remote(), timeout=120)
    return cluster


def start_node_worker() -> None:
    """Start the node worker of this node."""
    ray.get(node_actor(RayCoordinatorClient).address.remote(), timeout=100)


def entries_of(repository: str) -> list[tuple[int, int]]:
    """Return step and bytes of the entries in this node's memory."""
    worker = ray.get_actor(f"node-{ray.get_runtime_context().get_node_id()}", NAMESPACE)
    held = ray.get(worker.journal_entries.remote(repository), timeout=60)
    return sorted((info.step, info.size) for info in held)


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Return whether all tensors have the same bits."""
    return all(torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8)) for a, b in zip(ours, theirs, strict=True))


def step(training: Training, journal: raystow.Journal | None, micro_batches: int) -> float:
    """Train one step; return its seconds."""
    training.synchronize()
    start = now()
    for _ in range(micro_batches):
        training.forward_backward()
    training.update()
    if journal is not None:
        journal.record(training.step, values=training.step)
    training.synchronize()
    return now() - start


def whole_state(training: Training) -> dict[str, Any]:
    """Return all that a step depends on, without copies."""
    counts = [of["step"] for of in training.optimizer.state.values()]
    return {**training.state(), "step": {str(number): count for number, count in enumerate(counts)}}


def replay(training: Training, uri: str, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Save a version and record steps; restore the version, and replay them."""
    with raystow.Checkpointer(uri, rank=0, world_size=1, **options) as recorder:
        journal = recorder.journal(training.model, training.optimizer)
        journal.replay()
        step(training, journal, SHORT)
        first = training.step
        recorder.save(whole_state(training), step=first).result()
        times = [step(training, journal, SHORT) for _ in range(steps)]
        if not journal.flush(600) or journal.save_advised:
            raise SystemExit("the steps were not recorded: see the log")
        entries = entries_of(raystow.open(uri).id)
    after = [tensor.to("cpu", copy=True) for tensor in tensors_of(training.state())]
    with raystow.Checkpointer(uri, rank=0, world_size=1, **options) as restarted:
        restarted.restore_latest(into=whole_state(training))
        if same(tensors_of(training.state()), after):
            raise SystemExit("the state before the steps is the one after them")
        journal = restarted.journal(training.model, training.optimizer)
        training.synchronize()
        start = now()
        reached = journal.replay(training.copy_weights)
        training.synchronize()
        seconds = now() - start
    if reached != first + steps or not same(tensors_of(training.state()), after):
        raise SystemExit(f"the replay reached step {reached} of {first + steps}, or other bits")
    sizes = [size for _, size in entries]
    return {
        "steps": steps,
        "replay s": seconds,
        "replay ms a step": 1e3 * seconds / steps,
        "bytes of an entry": statistics.median(sizes),
        "entry / state": statistics.median(sizes) / nbytes(training.state()),
        "first steps ms": [1e3 * one for one in times],
        "same bits": True,
    }


def cost(
    training: Training, journal: raystow.Journal, checkpoint: Any, *, windows: int, steps: int, micro: int
) -> dict[str, Any]:
    """Alternate windows with and without recording; return the time that recording adds to a step."""

    peaks = {True: 0, False: 0}

    def window(recorded: bool) -> list[float]:
        training.synchronize()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        times = steps_of(recorded)
        if torch.cuda.is_available():
            peaks[recorded] = max(peaks[recorded], torch.cuda.max_memory_allocated())
        return times

    def steps_of(recorded: bool) -> list[float]:
        if recorded:
            checkpoint()  # begins a chain of entries
            step(training, journal, micro)
        else:
            journal._recorder._chained = False  # the hooks copy nothing
        return [step(training, journal if recorded else None, micro) for _ in range(steps)]

    return {
        **alternate(window, windows),
        "save advised": journal.save_advised,
        "device memory at most": {"recorded": peaks[True], "not recorded": peaks[False]},
    }


def alternate(window: Callable[[bool], list[float]], windows: int) -> dict[str, Any]:
    """Alternate windows without saves or recording and windows with them; return the time that they add to a step. ``window``
    returns the seconds of its steps."""
    calm, busy = [window(False)], list[list[float]]()
    for _ in range(windows):
        busy.append(window(True))
        calm.append(window(False))
    means = [statistics.mean(one) for one in calm]
    pairs = zip(busy, itertools.pairwise(means), strict=True)
    added = [statistics.mean(one) - (before + after) / 2 for one, (before, after) in pairs]
    base = statistics.median(means)
    return {
        "step ms": 1e3 * base,
        "added ms": 1e3 * statistics.median(added),
        "added ms of each window": [1e3 * one for one in added],
        "added %": 100 * statistics.median(added) / base,
        "step ms windows": [[1e3 * one for one in times] for times in busy],
    }


def every_step(training: Training, contestant: Contestant, folder: Path, *, windows: int, micro: int) -> dict[str, Any]:
    """Alternate windows with a save in every step and windows without saves; return the time that a save adds to its step."""
    stored = list[int]()

    def window(saved: bool) -> list[float]:
        training.synchronize()
        times, waits = list[float](), list[Any]()
        for _ in range(SAVES):
            start = now()
            if saved:
                waits.append(contestant.save(training.state(), training.step))
            for _ in range(micro):
                training.forward_backward()
            if saved:
                contestant.fence()
            training.update()
            training.synchronize()
            times.append(now() - start)
        for wait in waits:
            wait()
        if saved:
            stored.append(size(folder) // SAVES)
            clear(folder)
        return times[FIRST:]

    window(True)  # warm-up
    return {**alternate(window, windows), "bytes a step": statistics.median(stored)}


def clear(folder: Path) -> None:
    """Delete saved files, except those that a contestant needs to continue."""
    for file in folder.rglob("*"):
        if file.is_file() and file.stat().st_size > 1 << 20:
            file.unlink()


def with_versions(recorded: dict[str, Any], saved: dict[str, Any], entry: float) -> dict[str, Any]:
    """Return the mean cost and stored bytes of a step if all steps are recorded and one in ``VERSIONS`` is saved."""
    return {
        "step ms": recorded["step ms"],
        "added ms": recorded["added ms"] + saved["added ms"] / VERSIONS,
        "added %": recorded["added %"] + saved["added %"] / VERSIONS,
        "bytes a step": entry + saved["bytes a step"] / VERSIONS,
    }


def tables(results: dict[str, Any]) -> Iterator[Table]:
    """Yield the tables of the results."""
    table = table_of("At most one step is lost", "step ms", "added ms", "added %", "MB a step")
    for count, row in results["steps"].items():
        rows = {"journal": {**row, "bytes a step": results["replay"]["bytes of an entry"]}, **results["every step"][count]}
        for name, one in rows.items():
            figures = (f"{one[key]:.{places}f}" for key, places in (("step ms", 1), ("added ms", 2), ("added %", 2)))
            table.add_row(f"{count} micro-batches: {name}", *figures, f"{one['bytes a step'] / 1e6:.1f}")
    yield table
    row = results["replay"]
    table = table_of("Replay", "ms a step", "entry MB", "of the state")
    table.add_row(
        f"{row['steps']} steps",
        f"{row['replay ms a step']:.1f}",
        f"{row['bytes of an entry'] / 1e6:.1f}",
        f"{row['entry / state']:.4f}",
    )
    yield table


def claims(results: dict[str, Any]) -> dict[str, bool | None]:
    """Return the goals and whether this run meets them."""
    short, long = (results["steps"].get(str(count)) for count in (SHORT, LONG))
    return {
        "short steps: recording adds at most 3 %": short["added %"] <= 3 if short else None,
        "long steps: recording adds at most .6 %": long["added %"] <= 0.6 if long else None,
        "an entry takes at most .105 of the state": results["replay"]["entry / state"] <= 0.105,
        "a replayed step takes at most 60 ms": results["replay"]["replay ms a step"] <= 60,
    }


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    micro_batches: Annotated[list[int] | None, typer.Option(help="micro-batches per step (repeatable); default: 1 and 8")] = None,
    windows: Annotated[int, typer.Option(min=1, help="recorded windows")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="steps of a window")] = 10,
    warm_up: Annotated[int, typer.Option(min=1, help="training steps before the first measurement")] = 100,
    replayed: Annotated[int, typer.Option(min=1, help="steps to replay")] = 10,
    memory: Annotated[float, typer.Option(help="GiB of each node's memory for entries")] = 8.0,
    replicas: Annotated[int, typer.Option(min=0, max=1, help="partner nodes")] = 1,
    peers: Annotated[bool, typer.Option(help="whether to measure a version in every step, too")] = True,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a trial")] = "cuda",
    layers: Annotated[int, typer.Option(help="of the model")] = Size.layers,
    width: Annotated[int, typer.Option(help="of the model, a multiple of 64")] = Size.width,
    batch: Annotated[int, typer.Option(help="sequences in a micro-batch")] = Size.batch,
) -> None:
    """Measure the step journal."""
    where = device_named(device)
    console = Console(width=None if sys.stdout.isatty() else 150)
    lengths = micro_batches or [SHORT, LONG]
    cluster = start_cluster(int(where.type == "cuda"))
    training = Training(Size(layers=layers, width=width, batch=batch), where)
    training.run(warm_up)
    settings = {"windows": windows, "steps": steps, "replicas": replicas, "memory GiB": memory, "layers": layers, "width": width}
    options: dict[str, Any] = {
        "memory": raystow.Memory(journal=int(memory * (1 << 30))),
        "replication": raystow.Replication(replicas=replicas),
    }
    results: dict[str, Any] = {**about(where), "settings": settings, "state bytes": nbytes(training.state()), "steps": {}}
    results["every step"] = {str(count): {} for count in lengths}
    with tempfile.TemporaryDirectory(prefix="raystow-gpu-journal-", dir="/dev/shm") as folder:
        results["replay"] = replay(training, f"{folder}/replay", replayed, options)
        console.print(results["replay"])
        with raystow.Checkpointer(f"{folder}/cost", rank=0, world_size=1, **options) as checkpointer:
            journal = checkpointer.journal(training.model, training.optimizer)
            journal.replay()

            def checkpoint() -> None:
                """Begin a chain as a save does; earlier entries may be dropped."""
                journal.flush(600)
                journal._recorder._last = training.step
                journal._recorder.saved(training.step)

            step(training, journal, SHORT)  # creates the encoder and the buffers
            for count in lengths:
                measured = cost(training, journal, checkpoint, windows=windows, steps=steps, micro=count)
                results["steps"][str(count)] = measured
                console.print(f"{count} micro-batches: {measured['added ms']:.2f} ms of {measured['step ms']:.1f} ms a step")
                report.keep(out, "gpu_journal", results)
        makers = field(Path(folder), ("deflate",), None)
        for name in (TORCH_CHECKPOINTING, ours("deflate")) if peers else ():
            peer = makers[name]()
            for count in lengths:
                saved = every_step(training, peer, Path(folder), windows=windows, micro=count)
                results["every step"][str(count)][f"a version, {name}"] = saved
                console.print(f"{count} micro-batches, {name}: {saved['added ms']:.2f} ms of {saved['step ms']:.1f} ms a step")
                report.keep(out, "gpu_journal", results)
            peer.close()
        for count, rows in results["every step"].items() if peers else ():
            entry, saved = results["replay"]["bytes of an entry"], rows[f"a version, {ours('deflate')}"]
            rows[f"journal, a version in {VERSIONS} steps"] = with_versions(results["steps"][count], saved, entry)
    results["claims"] = claims(results)
    report.show(console, tables(results), results["claims"])
    report.write(console, out, "gpu_journal", results)
    ray.shutdown()
    cluster.shutdown()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    typer.run(main)
