"""Two GPUs of one host and one node worker: what a save costs each training, beside one that has the host to itself.

Two processes, each with a GPU of its own, train the model of ``gpu_workload`` and save it to repositories of their own (these
are two runs; raystow has one node worker for all runs of a node). First one of them is measured alone, as ``gpu_save`` does it,
then both at once. Then each puts its state back onto its GPU out of the node's memory, alone and both at once; every tensor is
compared bit for bit.

Both begin their windows at the same time, and are not held in step after that.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import ray
import torch
import typer
from gpu_restore import load
from gpu_save import LONG, SHORT, console_for_tables, measure, table_of
from gpu_workload import Size, State, Training, about, device_named, nbytes

ALONE, BOTH = "alone", "both at once"


class Trainer:
    """One of the two, in a process of its own."""

    def __init__(self, number: int, root: str, codec: str, steps: int, size: Size) -> None:
        from gpu_contestants import Raystow

        class FromMemory(Raystow):
            """Restores as a rank of the run does: from the node's memory."""

            def load(self, into: State) -> None:
                self.checkpointer.restore_latest(into=into, allow_uncommitted=False)

        self.training = Training(size, device_named("cuda"))
        self.training.run(steps)
        self.saver = FromMemory(Path(root) / f"run{number}", codec, None)

    def about(self) -> dict[str, Any]:
        """The machine and its software."""
        return {**about(device_named("cuda")), "bytes": nbytes(self.training.state())}

    def save(self, saves: int, micro_batches: int, every: int) -> dict[str, Any]:
        """See ``gpu_save.measure``."""
        return measure(self.training, self.saver, saves=saves, every=every, micro_batches=micro_batches)

    def keep(self) -> None:
        """Save what is to be restored."""
        state = self.training.state()
        self.kept = {group: {name: t.clone() for name, t in tensors.items()} for group, tensors in state.items()}
        wait = self.saver.save(state, self.training.step)
        self.saver.fence()
        wait()

    def restore(self, rounds: int) -> dict[str, Any]:
        """GB/s of raw bytes from the node's memory onto the GPU."""
        state = self.training.state()
        times = [load(self.training, self.saver, state, self.kept) for _ in range(rounds + 1)]
        return {"GB/s": nbytes(state) / 1e9 / statistics.median(times[1:]), "seconds": times}


def claims(results: dict[str, Any]) -> dict[str, bool]:
    """What raystow promises, and whether this run bears it out."""
    figures: dict[str, Callable[[dict[str, Any]], float]] = {
        "lost ms": lambda row: float(row["lost ms"]["median"]),
        "durable s": lambda row: float(row["durable s"]),
    }
    held = {}
    for length, rows in results["steps"].items():
        alone, both = rows[ALONE][0], rows[BOTH]
        for what, value in figures.items():
            held[f"{length} micro-batches: {what} of each within 25 % of one alone"] = all(
                value(row) <= 1.25 * value(alone) for row in both
            )
    held["each restores at least 20 GB/s from the node's memory"] = all(row["GB/s"] >= 20 for row in results["restore"][BOTH])
    return held


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    store: Annotated[Path, typer.Option(help="folder for the checkpoints; what was made in it is deleted")] = Path("/dev/shm"),
    codec: Annotated[str, typer.Option(help="that both save with")] = "deflate",
    saves: Annotated[int, typer.Option(min=1, help="windows with a save that count")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="training steps before anything is measured")] = 400,
    rounds: Annotated[int, typer.Option(min=1, help="restores that count")] = 5,
    saving: Annotated[bool, typer.Option(help="also measure what saves cost")] = True,
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
        object_store_memory=200 << 20,  # nothing of a checkpoint goes through it
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    with tempfile.TemporaryDirectory(prefix="raystow-gpu-pair-", dir=store) as root:
        actor = ray.remote(num_gpus=1)(Trainer)
        both = [actor.remote(number, root, codec, steps, Size()) for number in range(2)]
        results: dict[str, Any] = {**ray.get(both[0].about.remote()), "codec": codec, "steps": {}, "restore": {}}
        ray.get([trainer.about.remote() for trainer in both])
        groups = {ALONE: both[:1], BOTH: both}
        for length, every in ((SHORT, 10), (LONG, 4)) if saving else ():
            results["steps"][length] = {
                title: ray.get([trainer.save.remote(saves, length, every) for trainer in group])
                for title, group in groups.items()
            }
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
    for claim, holds in results["claims"].items():
        console.print(f"{'holds' if holds else 'DOES NOT HOLD'}: {claim}", highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"gpu_pair-{results['date'][:10]}.json"
    file.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"written to {file}")


if __name__ == "__main__":
    typer.run(main)
