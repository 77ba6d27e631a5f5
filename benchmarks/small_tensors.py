"""Measure what a save of 50,000 small tensors costs the training: state objects, and their state dicts.

*State.* A model of ``--parameters`` parameters of 64 elements, and Adam, which has three tensors for each. Each save follows
an optimizer step.

*Method.* One process, one Ray node. The ways take turns; a save begins when the one before is durable. A figure is the median of
``--saves`` calls of ``save`` and ``fence``, the first two not counted; on a busy machine, compare CPU times. ``dicts``: the
training calls ``get_state_dict(model, optimizer)``, which is counted. ``plain dicts``: ``model.state_dict()`` and
``optimizer.state_dict()``.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import report
import typer
from rich.console import Console


def measured(folder: Path, parameters: int, saves: int) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of ``save`` and ``fence`` of each way, and the CPU seconds of the calling thread."""
    import ray
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict

    import raystow

    ray.init(address="local", include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    torch.manual_seed(0)
    model = torch.nn.ParameterDict({f"p{i}": torch.randn(64) for i in range(parameters)})
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)

    def of_torch() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "objects": lambda: {"model": model, "optimizer": optimizer},
        "dicts": of_torch,
        "plain dicts": lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    }
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    checkpointers = {way: raystow.Checkpointer(folder / way.replace(" ", "-"), rank=0, world_size=1) for way in ways}
    for turn in range(-2, saves):
        for way, state in ways.items():
            for parameter in model.values():
                parameter.grad = torch.randn(64)
            optimizer.step()
            start, used = time.perf_counter(), time.thread_time()
            pending = checkpointers[way].save(state(), step=turn + 2)
            checkpointers[way].fence()
            if turn >= 0:
                found[way].append((time.perf_counter() - start, time.thread_time() - used))
            pending.result()
    return found


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    store: Annotated[Path, typer.Option(help="parent folder of the checkpoints, deleted at the end")] = Path("/dev/shm"),
    parameters: Annotated[int, typer.Option(min=1, help="parameters of the model; four tensors for each")] = 12_500,
    saves: Annotated[int, typer.Option(min=1, help="measured saves of each way")] = 9,
    note: Annotated[str, typer.Option(help="recorded: what else ran on the machine")] = "",
) -> None:
    """Measure what a save of many small tensors costs the training."""
    about: dict[str, Any] = {**report.about("raystow", "ray", "torch"), "note": note}
    with tempfile.TemporaryDirectory(prefix="raystow-small-", dir=store) as folder:
        found = measured(Path(folder), parameters, saves)
    medians = {way: [statistics.median(column) for column in zip(*rows, strict=True)] for way, rows in found.items()}
    table = report.table_of(f"a save of {4 * parameters:,} small tensors", "save and fence ms", "CPU ms of the thread")
    for way, (seconds, used) in medians.items():
        table.add_row(way, f"{1e3 * seconds:.0f}", f"{1e3 * used:.0f}")
    claims: dict[str, bool | None] = {
        "objects take at most 1.1 times as much CPU": medians["objects"][1] <= 1.1 * medians["dicts"][1]
    }
    report.show(Console(width=120), [table], claims)
    about["load after"] = os.getloadavg()[0]
    settings = {"store": str(store), "parameters": parameters, "saves": saves}
    report.write(
        Console(width=120),
        out,
        "small_tensors",
        {**about, "settings": settings, "seconds": medians, "all": found, "claims": claims},
    )


if __name__ == "__main__":
    typer.run(main)
