"""A save uses no more host memory than its budget, measured on real processes with states several times the budget.

``make soak`` repeats this with a larger budget and with versions kept in memory.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil
import pytest
import ray
import torch

import raystow
from integration.ranks import Rank, every, start

MIB = 1 << 20
SLACK = 64 * MIB


def resident(pids: list[int]) -> int:
    """Return the memory of all processes in bytes; shared pages are divided among the processes that share them (PSS)."""
    return sum(psutil.Process(pid).memory_full_info().pss for pid in pids)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("budget", "kept", "dtype"),
    [
        pytest.param(64 * MIB, 0, torch.float32, id="64MiB"),
        pytest.param(128 * MIB, 0, torch.bfloat16, id="128MiB", marks=pytest.mark.slow),
        pytest.param(64 * MIB, 100 * MIB, torch.float32, id="64MiB and 100MiB kept", marks=pytest.mark.slow),
    ],
)
def test_a_save_uses_at_most_its_memory_budget(tmp_path: Path, budget: int, kept: int, dtype: torch.dtype) -> None:
    (rank,) = start(str(tmp_path), 1, memory=raystow.Memory(staging=budget, cache=kept))
    size = 6 * budget
    every([rank], "set", lambda: {"w": torch.randn(1024, MIB // 1024), "x": 1})  # attaches to the node worker and warms up
    every([rank], "save", 1)
    every([rank], "result")

    def save_and_watch(self: Rank, pids: list[int]) -> tuple[int, int]:
        self.state = {f"layer{i}": torch.randn(size // 8 // dtype.itemsize).to(dtype) for i in range(8)}
        pids = [os.getpid(), *pids]
        before, peak, over = resident(pids), 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not over.wait(0.01):
                peak = max(peak, resident(pids))

        watcher = threading.Thread(target=watch)
        watcher.start()
        self.checkpointer.save(self.state, step=2).result(300)
        over.set()
        watcher.join()
        return before, peak

    before, peak = ray.get(rank.do.remote(save_and_watch, ray.get(rank.node_worker_pids.remote())), timeout=400)
    assert peak - before <= budget + kept + SLACK, f"{(peak - before) / MIB:.0f} MiB above the state"
    assert peak - before > budget // 8, "nothing was measured"
