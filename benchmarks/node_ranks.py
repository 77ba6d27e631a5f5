"""Measure the cost of a node worker for the saves of all GPUs of a host, without a GPU: one rank against eight.

*Simulation.* Each rank is a connection to one node worker, with a ring whose pages contain random bytes, as a GPU fills them with
encoded chunks. A save announces the chunks of each slot at once, and again when the slot is free, so only the node worker limits
the speed: writes to the store, one digest of 64 (a GPU computes the others), and the commit; in the case "copied" also the
copy into the memory of the node worker, which is needed if not enough memory can be pinned to keep versions in the ring.

*Method.* Node worker, coordinator and ranks are threads of this process, which does nothing else: the cost is its CPU time,
including the kernel's writes. ``--saves`` saves of one rank and of ``--ranks`` ranks take turns, after a warm-up save of each.
Figures are medians per byte that comes from the GPU, which is about .7 of the state's bytes.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import report
import typer
from rich.console import Console

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from helpers.coded_rank import CodedRank
from helpers.local_cluster import LocalCluster

from raystow.workers.shm.ring import DEVICE_SLOT

CHUNK = 8 << 20
SLOTS = 8
_PER_SLOT = DEVICE_SLOT // CHUNK


def measure(folder: Path, ranks: int, chunks: int, saves: int, *, copied: bool) -> dict[str, Any]:
    """Return seconds until durable and CPU seconds of each save of ``ranks`` ranks. ``copied``: into the node's memory."""
    found: dict[str, Any] = {"durable s": [], "cpu s": [], "bytes": ranks * chunks * CHUNK}
    with LocalCluster(str(folder), threads=os.cpu_count() or 1) as cluster, ThreadPoolExecutor(ranks) as pool:
        sizes: Any = {"chunks": chunks, "chunk": CHUNK, "slots": SLOTS, "slot": DEVICE_SLOT}
        keep = 0 if copied else 2 * chunks * CHUNK
        simulated = [CodedRank(cluster, rank, ranks, **sizes, keep=keep) for rank in range(ranks)]
        for one in simulated:
            one.ring.memory.reshape(-1, DEVICE_SLOT)[:] = np.random.default_rng(0).integers(0, 256, DEVICE_SLOT, np.uint8)
        for step in range(saves + 1):
            cpu, start = time.process_time(), time.perf_counter()
            list(pool.map(lambda rank, step=step: rank.save(step), simulated))
            if step:
                found["durable s"].append(time.perf_counter() - start)
                found["cpu s"].append(time.process_time() - cpu)
            for pack in folder.rglob("*.pack"):
                pack.unlink()
        for one in simulated:
            one.close()
    return found


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    store: Annotated[Path, typer.Option(help="parent folder of the repository, deleted at the end")] = Path("/dev/shm"),
    ranks: Annotated[int, typer.Option(min=2, help="ranks of the host")] = 8,
    gigabytes: Annotated[float, typer.Option(help="coded bytes of each rank, in GB; all are in memory four times")] = 2.0,
    saves: Annotated[int, typer.Option(min=1, help="measured saves")] = 3,
    note: Annotated[str, typer.Option(help="recorded: what else ran on the machine")] = "",
) -> None:
    """Measure the cost of a node worker for the saves of all GPUs of a host."""
    about: dict[str, Any] = {**report.about("raystow", "numpy", "blake3"), "note": note}
    chunks = max(1, round(gigabytes * 1e9 / DEVICE_SLOT)) * _PER_SLOT
    rows: dict[str, Any] = {}
    table = report.table_of(f"{chunks * CHUNK / 1e9:.2f} GB a rank, {store}", "durable s", "s/GB", "CPU s/GB")
    for count, copied in ((1, False), (ranks, False), (ranks, True)):
        name = f"{count} ranks, copied" if copied else f"{count} ranks"
        with tempfile.TemporaryDirectory(prefix="raystow-node-ranks-", dir=store) as folder:
            row = rows[name] = measure(Path(folder), count, chunks, saves, copied=copied)
        durable, cpu = statistics.median(row["durable s"]), statistics.median(row["cpu s"])
        row["s/GB"], row["cpu s/GB"] = durable / (row["bytes"] / 1e9), cpu / (row["bytes"] / 1e9)
        table.add_row(name, f"{durable:.2f}", f"{row['s/GB']:.3f}", f"{row['cpu s/GB']:.3f}")
    eight = rows[f"{ranks} ranks"]
    claims = {f"{ranks} ranks take at most 1.25 times as long per byte as one": eight["s/GB"] <= 1.25 * rows["1 ranks"]["s/GB"]}
    report.show(Console(width=120), [table], claims)
    about["load after"] = os.getloadavg()[0]
    settings = {"store": str(store), "gigabytes": gigabytes, "saves": saves}
    report.write(Console(width=120), out, "node_ranks", {**about, "settings": settings, "ranks": rows, "claims": claims})


if __name__ == "__main__":
    typer.run(main)
