"""Measure a whole recovery with Ray Train on one GPU: from SIGKILL of the training worker to the end of the first new step.

*Run.* A ``TorchTrainer`` with one worker trains the model of ``gpu_workload`` (6.17 GB of state, on random tokens), saves once to
/dev/shm, and continues to train. When the save is durable the worker is killed; Ray Train starts another one, which restores and
trains one step. Each run has a new Ray cluster and a new folder; scripts differ only in the saver. Runs of the savers take turns.

*Timeline.* Each row is the time since the row before, by the clock of the machine. "detected": Ray Train's controller polls its
workers every two seconds, so the worker is killed in the middle between two polls. "worker placed": the training function begins,
in a process in which Ray Train has imported torch and made the process group. "restored" begins when the model, the optimizer and
its state exist, and includes everything that the saver needs: for raystow the rest of its imports, the ``Checkpointer``, and the
report to Ray Train that the killed worker has not made. Every part ends with a synchronization of the GPU.

*Check.* A checksum of the bits of every tensor is noted before the save and compared after the restore; its time is left out.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import report
import typer
from gpu_recovery_training import DCP, RAYSTOW, STORE, TORCH_SAVE, NotePolls, Notes, train
from gpu_workload import Size, about, device_named
from rich.table import Table

PEERS = (TORCH_SAVE, DCP)
SAVERS = (RAYSTOW, *PEERS)
ROWS = {
    "killed": "",
    "detected": "detected",
    "function begins": "worker placed",
    "imported": "imports",
    "model built": "model built",
    "restored": "restored",
    "checked": "",  # the checksum, which is not part of a recovery
    "first step done": "first step",
}
"""Event -> name of the part that this event ends."""
SOURCES = {RAYSTOW: {"memory"}, STORE: {"store"}}
"""Sources from which raystow's restore reads the stored bytes: this node's memory, or the store."""
RESTORED, SUM = ROWS["restored"], "sum"
MOST, TOLERANCE = 1.0, 1.02
_POLLS = 2.0  # seconds between two polls of Ray Train's controller, by default


def kill_when_ready(notes: Notes, over: threading.Event) -> None:
    """Kill the worker in the middle between two polls once it is ready, and note it."""
    while not over.wait(0.02):
        events = notes.read()
        if not any(note["event"] == "ready to be killed" for note in events):
            continue
        if events[-1]["event"] == "polled":
            time.sleep(max(0.0, float(events[-1]["at"]) + _POLLS / 2 - time.time()))
            pid = next(int(note["pid"]) for note in events if note["event"] == "function begins")
            notes.add("killed")
            os.kill(pid, signal.SIGKILL)
            return


def recovery(saver: str, folder: Path, device: str, size: dict[str, int]) -> dict[str, float]:
    """Train, kill and recover once; return the seconds of each part, and their sum."""
    import ray
    import ray.train
    from gpu_contestants import start_ray
    from ray.train.torch import TorchConfig, TorchTrainer

    notes, over = Notes(folder), threading.Event()
    killer = threading.Thread(target=kill_when_ready, args=(notes, over))
    start_ray()
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "saver": saver, "device": device, "size": size},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=1, use_gpu=device == "cuda"),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=str(folder / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=1),
            callbacks=[NotePolls(folder)],
        ),
    )
    killer.start()
    try:
        trainer.fit()
    finally:
        over.set()
        killer.join()
        ray.shutdown()
    return timeline(saver, notes.read())


def timeline(saver: str, events: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of each part and their sum. Raises ``SystemExit`` if the recovery is incorrect."""
    first = {note["event"]: note for note in reversed(events)}
    if "killed" not in first:
        raise SystemExit(f"{saver}: the worker ended before it was killed")
    after = {note["event"]: note for note in reversed(events) if note["at"] >= first["killed"]["at"]}
    if missing := [event for event in ROWS if event not in after]:
        raise SystemExit(f"{saver}: no {' and no '.join(missing)} after the kill")
    if (
        after["checked"]["digest"] != first["saving"]["digest"]
        or first["saving"]["digest"] == first["ready to be killed"]["changed"]
    ):
        raise SystemExit(f"{saver} did not restore the bits of the state that was saved")
    sources = {source for source, nbytes in after["restored"]["bytes_read"].items() if nbytes}
    if saver in SOURCES and sources != SOURCES[saver]:
        raise SystemExit(f"{saver} has read from {sources}")
    at = {event: float(after[event]["at"]) for event in ROWS}
    parts = {ROWS[event]: at[event] - at[before] for before, event in itertools.pairwise(ROWS) if ROWS[event]}
    return {
        **parts,
        SUM: sum(parts.values()),
        "of which the saver's start": float(after["saver made"]["at"]) - at["model built"],
        "save until durable": float(first["durable"]["at"]) - float(first["saving"]["at"]),
    }


def medians(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Return the median of each figure, and all rounds."""
    return {**{name: statistics.median(one[name] for one in rounds) for name in rounds[0]}, "all": rounds}


def tables(recoveries: dict[str, Any]) -> Iterator[Table]:
    """Yield the table of the timelines."""
    table = report.table_of("recovery: seconds of each part, medians", *recoveries)
    for name in next(iter(recoveries.values())):
        if name != "all":
            table.add_row(name, *(f"{row[name]:.2f}" for row in recoveries.values()))
    yield table


def claims(recoveries: dict[str, Any]) -> dict[str, bool | None]:
    """Return the goals, and whether this run meets them; None: not measured."""
    ours = recoveries.get(RAYSTOW)
    found: dict[str, bool | None] = {f"raystow restores in {MOST:.0f} s": None if ours is None else ours[RESTORED] <= MOST}
    for peer in PEERS:
        theirs = recoveries.get(peer)
        slower = None if ours is None or theirs is None else ours[SUM] > theirs[SUM] * TOLERANCE
        found[f"the sum is no longer than with {peer}"] = None if slower is None else not slower
    return found


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    store: Annotated[Path, typer.Option(help="parent folder of the checkpoints, deleted after each run")] = Path("/dev/shm"),
    rounds: Annotated[int, typer.Option(min=1, help="recoveries for each saver")] = 3,
    saver: Annotated[
        list[str] | None, typer.Option(help=f"saver to measure (repeatable), also {STORE!r}; default: the others")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a trial")] = "cuda",
    layers: Annotated[int, typer.Option(help="of the model")] = Size.layers,
    width: Annotated[int, typer.Option(help="of the model, a multiple of 64")] = Size.width,
    context: Annotated[int, typer.Option(help="tokens in a sequence")] = Size.context,
    batch: Annotated[int, typer.Option(help="sequences in a micro-batch")] = Size.batch,
) -> None:
    """Measure a whole recovery with Ray Train."""
    from gpu_save import console_for_tables

    console, names = console_for_tables(), report.chosen(saver or SAVERS, (*SAVERS, STORE))
    size = {"layers": layers, "width": width, "context": context, "batch": batch}
    results: dict[str, Any] = {**about(device_named(device)), "settings": {"rounds": rounds, "device": device, **size}}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number, name in itertools.product(range(rounds), names):
        folder = Path(tempfile.mkdtemp(prefix="raystow-gpu-recovery-", dir=store))
        try:
            found[name].append(recovery(name, folder, device, size))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        parts = {part: round(seconds, 2) for part, seconds in found[name][-1].items()}
        console.print(f"round {number + 1}, {name}: {parts}", highlight=False, markup=False)
        results["recoveries"] = {saver: medians(output) for saver, output in found.items() if output}
        report.keep(out, "gpu_recovery", results)
    results["claims"] = claims(results["recoveries"])
    report.show(console, tables(results["recoveries"]), results["claims"])
    report.write(console, out, "gpu_recovery", results)
    report.leave()


if __name__ == "__main__":
    typer.run(main)
