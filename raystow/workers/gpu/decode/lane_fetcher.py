"""Threads that fetch the stored bytes of lanes into pinned memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

from ....storage.versions.runs import ReadRun
from .lane_plan import Fetch

THREADS = min(16, os.cpu_count() or 1)
"""Threads that copy runs which are in memory."""

Arrivals = SimpleQueue[BaseException | None]
"""Receives the outcome of each fetch: an error, or None."""


class LaneFetcher:
    """Fetches in the order of the calls, by ``threads`` threads. Futures would take the interpreter lock for longer."""

    def __init__(self, read: ReadRun, threads: int) -> None:
        self._read, self._threads, self._started = read, threads, 0
        self._pool = ThreadPoolExecutor(threads, "raystow-read")
        self._wanted = SimpleQueue[tuple[Fetch, memoryview, Arrivals] | None]()

    def fetch(self, what: Iterable[tuple[Fetch, memoryview]]) -> Arrivals:
        """Fetch runs, each into its memory, in the background."""
        arrivals = Arrivals()
        for fetch, into in what:
            self._wanted.put((fetch, into, arrivals))
            if self._started < self._threads:
                self._started += 1
                self._pool.submit(self._work)
        return arrivals

    def close(self) -> None:
        """End the threads. What none has begun to fetch is not fetched."""
        with contextlib.suppress(Empty):
            while True:
                self._wanted.get_nowait()
        for _ in range(self._started):
            self._wanted.put(None)
        self._pool.shutdown()

    def _work(self) -> None:
        while (one := self._wanted.get()) is not None:
            fetch, into, arrivals = one
            error: BaseException | None = None
            try:
                with fetch.needed():
                    self._read(fetch.run, into)
            except BaseException as caught:
                error = caught
            arrivals.put(error)
