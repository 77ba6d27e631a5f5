from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import numpy as np

from raystow.storage.coding.chunk import Coding, packed
from raystow.storage.errors import SaveFailed
from raystow.storage.stores.memory import MemoryStore
from raystow.workers.packing.attempt import NodeAttempt, Outcome, Workshop, draft
from raystow.workers.packing.budget import Budget
from raystow.workers.packing.staleness import OptimizerWatch
from raystow.workers.port import Ticket


class GivenUp:
    """The port to a coordinator that has given the attempt up."""

    def wait_complete(self, ticket: Ticket) -> None:
        raise SaveFailed("given up")

    def failed(self, ticket: Ticket, reason: str) -> None:
        pass


def test_a_rank_that_joins_too_late_hears_so() -> None:
    heard: list[Outcome] = []
    first = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        port: Any = GivenUp()
        ticket = Ticket(1, "0123456789abcdef", 0, 60.0, 1)
        shared = Workshop(pool, pool, pool, Budget())
        attempt = NodeAttempt(MemoryStore("late"), port, ticket, shared, OptimizerWatch("memory://late"))
        attempt.join(0, [], lambda outcome, _: first.set())
        assert first.wait(10)
        attempt.join(1, [], lambda outcome, _: heard.append(outcome))
    assert [str(outcome) for outcome in heard] == ["given up"]


def test_what_a_gpu_has_coded_is_understood() -> None:
    sizes = np.array([5000, 70_000, 1], np.int64)
    announced = {
        "name": "w",
        "path": '["w"]',
        "kind": "tensor",
        "dtype": "bfloat16",
        "shape": [40_000],
        "offset": [0],
        "extent": [40_000],
        "group": "weights",
        "coding": [True, True, ["raw", "deflate"], [40_000, 75_001], 16_384, None],
        "streams": sizes.astype("<i4").tobytes(),
        "digest": 2**64 - 1,
    }
    chunk = draft(msgpack.unpackb(msgpack.packb(announced)), 3)
    assert chunk.coding == Coding(True, True, ("raw", "deflate"), (40_000, 75_001), packed((5000, 70_000, 1)), 16_384)
    assert (chunk.node, chunk.raw_digest, chunk.shape, chunk.nbytes) == (3, 2**64 - 1, (40_000,), 80_000)
