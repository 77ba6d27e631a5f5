"""Measure two GPUs of one host with one node worker: the cost of saves for each training, compared with one that runs alone.

Two processes, each with a GPU, train the model of ``gpu_workload`` and save it to separate repositories; raystow has one node
worker per node. One process is measured alone, as by ``gpu_save``, then both concurrently. Then each restores its state from the
node's memory, alone and concurrently; every tensor is compared bit for bit. Both begin each window at the same time, and so each
save. CPU time is not measured: that of the node worker belongs to both.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import ray
import report
import torch
import typer
from gpu_restore import load
from gpu_save import LONG, SHORT, Others, console_for_tables, measure
from gpu_workload import Size, Training, about, device_named, nbytes
from report import table_of

NO_GROUP, BOTH = "alone", "both at once"
_PATIENCE = 120.0  # seconds that a training waits for the other

Barrier = ray.remote(num_cpus=0, max_concurrency=2)(threading.Barrier)


class Meeting(Others):
    """Trainings that meet at a barrier, an actor."""

    def __init__(self, barrier: Any) -> None:
        self._barrier, self._all_ready = barrier, None

    def ready(self) -> bool:
        if self._all_ready is None:
            self._all_ready = self._barrier.wait.remote(_PATIENCE)
        return bool(ray.wait([self._all_ready], timeout=0)[0])

    def meet(self) -> None:
        self._all_ready = None
        ray.get(self._barrier.wait.remote(_PATIENCE))


class Trainer:
    """One of the two trainings, in a separate process."""

    def __init__(self, number: int, root: str, codec: str, steps: int, size: Size) -> None:
        from gpu_contestants import RaystowMemory

        self.training = Training(size, device_named("cuda"))
        self.training.run(steps)
        self.saver = RaystowMemory(Path(root) / f"run{number}", codec, None)

    def about(self) -> dict[str, Any]:
        """Describe the machine and its software."""
        return {**about(device_named("cuda")), "bytes": nbytes(self.training.state())}

    def save(self, saves: int, micro_batches: int, every: int, barrier: Any) -> dict[str, Any]:
        """See ``gpu_save.measure``."""
        sizes = {"saves": saves, "every": every, "micro_batches": micro_batches}
        row = measure(self.training, self.saver, others=Meeting(barrier), **sizes)
        del row["cpu s/GB"]
        return row

    def keep(self) -> None:
        """Save the state to be restored."""
        state = self.training.state()
        self.kept = {group: {name: t.clone() for name, t in tensors.items()} for group, tensors in state.items()}
        wait = self.saver.save(state, self.training.step)
        self.saver.fence()
        wait()

    def restore(self, rounds: int) -> dict[str, Any]:
        """Restore from the node's memory onto the GPU; return GB/s of raw bytes."""
        state = self.training.state()
        times = [load(self.training, self.saver, state, self.kept) for _ in range(rounds + 1)]
        return {"GB/s": nbytes(state) / 1e9 / statistics.median(times[1:]), "seconds": times}


def claims(results: dict[str, Any]) -> dict[str, bool]:
    """Return raystow's goals, and whether this run meets them."""
    figures: dict[str, Callable[[dict[str, Any]], float]] = {
        "lost ms": lambda row: float(row["lost ms"]["median"]),
        "durable s": lambda row: float(row["durable s"]),
    }
    held = {}
    for length, rows in results["steps"].items():
        alone, both = rows[NO_GROUP][0], rows[BOTH]
        for what, value in figures.items():
            held[f"{length} micro-batches: {what} of each within 15 % of one alone"] = all(
                value(row) <= 1.15 * value(alone) for row in both
            )
    held["each restores at least 20 GB/s from the node's memory"] = all(row["GB/s"] >= 20 for row in results["restore"][BOTH])
    return held


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    store: Annotated[Path, typer.Option(help="parent folder of the checkpoints, deleted at the end")] = Path("/dev/shm"),
    codec: Annotated[str, typer.Option(help="codec of both")] = "deflate",
    saves: Annotated[int, typer.Option(min=1, help="measured windows with a save")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="training steps before the first measurement")] = 400,
    rounds: Annotated[int, typer.Option(min=1, help="measured restores")] = 5,
    saving: Annotated[bool, typer.Option(help="also measure the cost of saves")] = True,
) -> None:
    """Measure two trainings on one host."""
    console = console_for_tables()
    if torch.cuda.device_count() < 2:
        console.print("two GPUs of one host are not measured: there is one at most")
        return
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_gpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 << 20,  # no checkpoint data goes through it
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    with tempfile.TemporaryDirectory(prefix="raystow-gpu-pair-", dir=store) as root:
        actor = ray.remote(num_gpus=1)(Trainer)
        both = [actor.remote(number, root, codec, steps, Size()) for number in range(2)]
        results: dict[str, Any] = {**ray.get(both[0].about.remote()), "codec": codec, "steps": {}, "restore": {}}
        ray.get([trainer.about.remote() for trainer in both])
        groups = {NO_GROUP: both[:1], BOTH: both}
        for length, every in ((SHORT, 10), (LONG, 4)) if saving else ():
            results["steps"][length] = {}
            for title, group in groups.items():
                barrier = Barrier.remote(len(group))
                rows = ray.get([trainer.save.remote(saves, length, every, barrier) for trainer in group])
                results["steps"][length][title] = rows
                console.print(f"{length} micro-batches, {title}: durable after", *(f"{row['durable s']:.3f} s" for row in rows))
                report.keep(out, "gpu_pair", results)
        ray.get([trainer.keep.remote() for trainer in both])
        for title, group in groups.items():
            results["restore"][title] = ray.get([trainer.restore.remote(rounds) for trainer in group])
    table = table_of(f"{results['bytes'] / 1e9:.2f} GB on each GPU, {codec}", "micro-batches", "lost ms", "fence ms", "durable s")
    for length, rows in results["steps"].items():
        for title, group in rows.items():
            for row in group:
                cells = (row["lost ms"]["median"], row["fence ms"])
                table.add_row(title, str(length), *(f"{cell:.1f}" for cell in cells), f"{row['durable s']:.3f}")
    console.print(table)
    for title, group in results["restore"].items():
        rates = ", ".join(f"{row['GB/s']:.1f} GB/s" for row in group)
        console.print(f"restored from the node's memory, {title}: {rates}")
    results["claims"] = claims(results)
    report.show(console, [], results["claims"])
    report.write(console, out, "gpu_pair", results)


if __name__ == "__main__":
    typer.run(main)
