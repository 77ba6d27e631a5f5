from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raystow.storage.errors import SaveFailed
from raystow.storage.memory_budget import MemoryBudget
from raystow.storage.stores.memory import MemoryStore
from raystow.workers.packing.attempt import Executors, NodeAttempt, Outcome
from raystow.workers.packing.stale_state import OptimizerWatch
from raystow.workers.protocol.messages import Ticket


class GivenUp:
    """A port to a coordinator that has given up the attempt."""

    def wait_complete(self, ticket: Ticket) -> None:
        raise SaveFailed("given up")

    def failed(self, ticket: Ticket, reason: str) -> None:
        pass


def test_a_rank_that_joins_too_late_gets_the_error() -> None:
    heard: list[Outcome] = []
    first = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        port: Any = GivenUp()
        ticket = Ticket(1, "0123456789abcdef", 0, 60.0, 1)
        shared = Executors(pool, pool, pool, MemoryBudget())
        attempt = NodeAttempt(MemoryStore("late"), port, ticket, shared, OptimizerWatch("memory://late"))
        attempt.join(0, [], lambda outcome, _: first.set())
        assert first.wait(10)
        attempt.join(1, [], lambda outcome, _: heard.append(outcome))
    assert [str(outcome) for outcome in heard] == ["given up"]
