"""Measure what a node worker does with the saves of all GPUs of a host, without a GPU: one rank against eight.

*What is simulated.* Each rank is a connection to one node worker, with a ring whose pages were filled before with random bytes,
as a GPU fills them with coded chunks. A save announces the chunks of each slot at once, and again when the slot is free, so
that the node worker alone sets the pace: digests of what is stored, the copy into its memory, writes to the store, the commit.

*Method.* Node worker, coordinator and ranks are threads of this process, which does nothing else: its CPU time, the kernel's
writes included, is the cost. ``--saves`` saves of one rank and of ``--ranks`` ranks take turns, after one of each that does not
count. Figures are medians, per byte that comes from the GPU: about .7 of the state's bytes.
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
from msgspec.structs import replace
from rich.console import Console

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from local_cluster import LocalCluster, first_save

from raystow.workers.protocol.coordinator_client import coverage
from raystow.workers.protocol.messages import (
    STAGING_ANSWERS,
    BatchBytes,
    BeginSave,
    ChunkInfo,
    CodedBatches,
    CodedLayout,
    EndSave,
    SaveDone,
    SaveLost,
    SessionOpened,
    SlotFilled,
    SlotFree,
    StageCoded,
)
from raystow.workers.protocol.unix_channel import Connection
from raystow.workers.shm.ring import DEVICE_SLOT, Ring

CHUNK = 8 << 20
SLOTS = 8
_PER_SLOT = DEVICE_SLOT // CHUNK


class SimulatedRank:
    """A training process whose GPU has coded its chunks; ``chunks``: of ``CHUNK`` bytes, a multiple of those of a slot."""

    def __init__(self, cluster: LocalCluster, rank: int, ranks: int, chunks: int) -> None:
        self._name, self._chunks, self._saves = f"w{rank}", chunks, 0
        self._opening = replace(
            cluster.opening(rank, ranks), ring=SLOTS * DEVICE_SLOT, slot=DEVICE_SLOT, coded=SLOTS * DEVICE_SLOT, cache=1 << 40
        )
        self._connection = Connection.connect(cluster.address(0))
        self._connection.send(self._opening)
        answer = self._connection.receive(SessionOpened)
        assert answer is not None
        assert answer[1] is not None
        self._ring = Ring(answer[1], answer[0].slots, answer[0].slot_size)
        self._ring.memory.reshape(-1, DEVICE_SLOT)[:] = np.random.default_rng(rank).integers(0, 256, DEVICE_SLOT, np.uint8)
        infos = tuple(
            ChunkInfo(self._name, f'["{self._name}"]', "tensor", "uint8", (chunks * CHUNK,), "weights", (i * CHUNK,), (CHUNK,))
            for i in range(chunks)
        )
        batches = tuple((i, i + 1, CHUNK) for i in range(chunks))
        sizes, zeros = (CHUNK,) * chunks, (0,) * chunks
        self._connection.send(CodedLayout(0, infos, sizes, zeros, zeros, zeros, batches))

    def save(self, step: int) -> None:
        """Announce all chunks as slots become free, and wait until the version is durable."""
        self._saves += 1
        total = coverage(self._name, "uint8", (self._chunks * CHUNK,), self._chunks * CHUNK)
        begin = first_save(self._opening, save=self._saves, step=step, timeout=600.0, expected=total)
        self._connection.send(BeginSave(begin, ()))
        free, left, ended = list(range(self._ring.slots)), self._chunks, False
        while not ended:
            while free and left:
                slot = free.pop()
                first = self._chunks - left
                left -= _PER_SLOT
                batches = tuple(
                    BatchBytes(first + i, np.int64(first + i).tobytes(), (((0, slot, i * CHUNK, CHUNK),),))
                    for i in range(_PER_SLOT)
                )
                self._connection.send(StageCoded(0, (CodedBatches(batches),)))
                self._connection.send(SlotFilled(slot))
                if not left:
                    self._connection.send(EndSave(step, None, {}))
            received = self._connection.receive(*STAGING_ANSWERS)
            assert received is not None
            match received[0]:
                case SlotFree(slot):
                    free.append(slot)
                case SaveLost() as lost:
                    raise SystemExit(f"the save failed: {lost}")
                case SaveDone():
                    ended = True

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()


def measure(folder: Path, ranks: int, chunks: int, saves: int) -> dict[str, Any]:
    """Return seconds until durable and CPU seconds of each save of so many ranks."""
    found: dict[str, Any] = {"durable s": [], "cpu s": [], "bytes": ranks * chunks * CHUNK}
    with LocalCluster(str(folder), threads=os.cpu_count() or 1) as cluster, ThreadPoolExecutor(ranks) as pool:
        simulated = [SimulatedRank(cluster, rank, ranks, chunks) for rank in range(ranks)]
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
    gigabytes: Annotated[float, typer.Option(help="coded bytes of each rank, in GB; all are in memory twice")] = 2.0,
    saves: Annotated[int, typer.Option(min=1, help="measured saves")] = 3,
    note: Annotated[str, typer.Option(help="recorded: what else ran on the machine")] = "",
) -> None:
    """Measure what a node worker does with the saves of all GPUs of a host."""
    about: dict[str, Any] = {**report.about("raystow", "numpy", "blake3"), "note": note}
    chunks = max(1, round(gigabytes * 1e9 / DEVICE_SLOT)) * _PER_SLOT
    rows: dict[str, Any] = {}
    table = report.table_of(f"{chunks * CHUNK / 1e9:.2f} GB a rank, {store}", "durable s", "s/GB", "CPU s/GB")
    for count in (1, ranks):
        with tempfile.TemporaryDirectory(prefix="raystow-node-ranks-", dir=store) as folder:
            row = rows[str(count)] = measure(Path(folder), count, chunks, saves)
        durable, cpu = statistics.median(row["durable s"]), statistics.median(row["cpu s"])
        row["s/GB"], row["cpu s/GB"] = durable / (row["bytes"] / 1e9), cpu / (row["bytes"] / 1e9)
        table.add_row(f"{count} ranks", f"{durable:.2f}", f"{row['s/GB']:.3f}", f"{row['cpu s/GB']:.3f}")
    claims = {
        f"{ranks} ranks take at most 1.25 times as long per byte as one": rows[str(ranks)]["s/GB"] <= 1.25 * rows["1"]["s/GB"]
    }
    report.show(Console(width=120), [table], claims)
    about["load after"] = os.getloadavg()[0]
    settings = {"store": str(store), "gigabytes": gigabytes, "saves": saves}
    report.write(Console(width=120), out, "node_ranks", {**about, "settings": settings, "ranks": rows, "claims": claims})


if __name__ == "__main__":
    typer.run(main)
