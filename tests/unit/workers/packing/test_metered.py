"""The write rate of a metered store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock

import pytest

from raystow.storage.errors import StoreUnavailable
from raystow.storage.runtime.clock import Clock
from raystow.storage.stores.memory import MemoryStore
from raystow.workers.packing.metered_store import Metered


class Ticking(Clock):
    """A clock that advances by a second with each call."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = Lock()

    def monotonic(self) -> float:
        with self._lock:
            self.seconds += 1
            return self.seconds


def test_the_rate_is_bytes_over_busy_time() -> None:
    store = Metered(MemoryStore("metered"), Ticking())
    assert store.rate == 0
    store.put("a", [b"x" * 30])
    store.put("b", [b"x" * 10, memoryview(b"x" * 20)])
    assert store.rate == 30  # 60 bytes in two puts of one second
    assert store.get("b", max_bytes=99) == b"x" * 30


def test_concurrent_puts_share_the_busy_time() -> None:
    inner = MemoryStore("metered-together")
    both = Barrier(2)
    put = inner.put
    inner.put = lambda key, parts: (both.wait(10), put(key, parts))[1]  # type: ignore[method-assign]
    store = Metered(inner, Ticking())
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda key: store.put(key, [b"x" * 50]), "ab"))
    assert store.rate == 100  # both puts within one second


def test_a_failed_put_does_not_change_the_rate() -> None:
    inner = MemoryStore("metered-failing")
    store = Metered(inner, Ticking())

    def refuse(key: str, parts: object) -> None:
        raise StoreUnavailable("no", subject=key)

    inner.put = refuse  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        store.put("a", [b"x"])
    assert store.rate == 0
