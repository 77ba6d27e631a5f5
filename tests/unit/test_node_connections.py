"""A node worker connects to coordinators and stores of several repositories."""

from __future__ import annotations

import contextlib
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raystow.workers.node.node import Node


class NoCoordinator:
    def rank_disconnected(self, rank: int, incarnation: str, reason: str) -> None: ...


def test_a_connection_that_hangs_blocks_nothing_else() -> None:
    """While Ray's head node is frozen, a connection takes a minute: the status and other repositories do not wait for it."""
    connecting, end = queue.SimpleQueue[str](), threading.Event()

    def connect(uri: str) -> Any:
        if uri == "memory://hanging":
            connecting.put(uri)
            end.wait()
        return NoCoordinator()

    with contextlib.closing(Node("n", connect, threads=1)) as node, ThreadPoolExecutor() as pool:
        try:
            pool.submit(node.rank_disconnected, "memory://hanging", 0, "a", "it ended")
            connecting.get(timeout=10)
            assert pool.submit(node.status).result(10).node == "n"
            assert pool.submit(node.store_rate, "memory://hanging").result(10) == 0.0
            pool.submit(node.rank_disconnected, "memory://other", 0, "a", "it ended").result(10)
            assert "memory://other" in node.status().uploaded
        finally:
            end.set()
