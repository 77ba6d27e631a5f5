"""What a rank reads through its node worker, and when it asks the store itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from raystow.storage.clock import SYSTEM
from raystow.storage.errors import RaystowError, StoreError, StoreUnavailable
from raystow.storage.stores.memory import MemoryStore
from raystow.workers.fetching.borrowing import Borrowing, Place
from raystow.workers.fetching.fetcher import Fetcher, Nowhere
from raystow.workers.fetching.lender import lend
from raystow.workers.ipc.wire import Listener
from raystow.workers.memory.memory_tier import MemoryTier


class Failing(MemoryStore):
    """What the node worker sees of the store."""

    error: RaystowError = StoreUnavailable("503", subject="pack")

    def get_range_into(self, key: str, start: int, target: memoryview) -> None:
        raise self.error


@pytest.fixture
def failing() -> Failing:
    return Failing("borrowing")


@pytest.fixture
def rank(failing: Failing) -> Iterator[Borrowing]:
    """A rank to which the store answers, though not to its node worker."""
    listener, fetcher = Listener(f"raystow-test-{SYSTEM.token()}"), Fetcher(MemoryTier(0), Nowhere(), budget=1 << 20)

    def serve() -> None:
        connection = listener.accept()
        assert connection is not None
        received = connection.receive()
        assert received is not None
        with fetcher.visit():
            lend(connection, received[0], fetcher, lambda uri: failing)
        connection.close()

    serving = threading.Thread(target=serve)
    serving.start()
    store = MemoryStore("borrowing")
    store.put("pack", [b"bytes"])
    borrowing = Borrowing(store, listener.name, "r")
    borrowing.place = lambda key: Place(5)
    yield borrowing
    borrowing.close()
    serving.join(10)
    listener.close()


def test_a_store_that_is_down_is_not_waited_for_twice(rank: Borrowing) -> None:
    with pytest.raises(StoreUnavailable, match="pack: the node worker waited for the store in vain: pack: 503"):
        rank.get_range("pack", 0, 5)


def test_what_the_node_worker_may_not_read_the_rank_reads_itself(rank: Borrowing, failing: Failing) -> None:
    failing.error = StoreError("403", subject="pack")
    assert rank.get_range("pack", 0, 5) == b"bytes"
    assert rank.read == {"store": 5}
