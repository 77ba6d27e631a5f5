"""Decides whether a node worker codes what training processes stage in host memory, or stores it raw.

Coding makes a version smaller. It takes cores that the training may need, and with a fast store the version is durable later.
"""

from __future__ import annotations

import functools
import os
import threading
from pathlib import Path

import numpy as np

from ...storage.coding.chunk import RAW, ZSTD
from ...storage.runtime.clock import SYSTEM
from ..chosen_codec import GAIN, ChosenCodec
from .chunk_writer import encode

SHARE = 0.25
"""The largest part of a node's cores that coding may take where ``Compression`` does not ask for it."""

_SAMPLE = 1 << 20  # bytes
_STAT = Path("/proc/stat")


class HostCoding:
    """Chooses for each save of a node. Thread-safe. ``threads``: that code; by default, as many as there are cores."""

    def __init__(self, threads: int | None = None) -> None:
        self._cores = len(os.sched_getaffinity(0))
        self._most = min(SHARE * self._cores, threads or self._cores)
        self._lock = threading.Lock()
        self._before = 0, 0

    def choose(self, store: float) -> ChosenCodec:
        """Return what is faster. ``store``: the store's throughput in bytes per second, 0 if it is unknown."""
        if not store:
            return ChosenCodec(ZSTD, "tensors in host memory: what the store takes is not known yet")
        return sooner(store=store / 1e9, cores=min(self._most, self._idle()), coding=_coding_rate())

    def _idle(self) -> float:
        """The cores that were idle since the last call; all at the first one, or where the system does not tell."""
        try:
            ticks = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
        except OSError:
            return self._cores
        now = ticks[3] + ticks[4], sum(ticks)  # idle, and idle while a disk is waited for
        with self._lock:
            (idle, total), self._before = self._before, now
        return self._cores * (now[0] - idle) / (now[1] - total) if total and now[1] > total else self._cores


def sooner(*, store: float, cores: float, coding: float) -> ChosenCodec:
    """Return ``zstd`` or ``raw``. In GB/s: ``store``, and ``coding`` of a core. ``cores``: that may code."""
    coded = max((1 - GAIN) / store, 1 / max(1e-9, cores * coding))  # seconds for a GB of state: coding and storing overlap
    why = (
        f"tensors in host memory: {cores:.1f} cores ({SHARE:.0%} of all, or fewer that are idle) code {cores * coding:.2f} GB/s, "
        f"the store takes {store:.2f}: a GB takes {min(coded, 9999):.1f} s with zstd and {1 / store:.1f} s without"
    )
    return ChosenCodec(ZSTD if coded < 1 / store else RAW, why)


@functools.cache
def _coding_rate() -> float:
    """Measure the coding of weights in bfloat16 on one core, in GB/s: the fastest of three, since others use the core, too."""
    weights = (0.02 * np.sin(np.arange(_SAMPLE // 2))).astype("<f4").view("<u2")[1::2].copy()
    raw, seconds = weights.view(np.uint8), list[float]()
    for _ in range(3):
        begin = SYSTEM.monotonic()
        encode("bfloat16", raw)
        seconds.append(SYSTEM.monotonic() - begin)
    return float(raw.size / 1e9 / max(1e-9, min(seconds)))
