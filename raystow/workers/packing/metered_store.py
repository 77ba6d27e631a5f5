"""A store that knows how fast it takes what is given to it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from ...storage.clock import Clock
from ...storage.metrics import UPLOADED, record
from ...storage.object_store import Buffer, ObjectStore


class Metered:
    """An ``ObjectStore`` around another that measures ``put``: bytes over the time in which at least one was under way."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = self._busy = 0.0
        self._bytes = 0

    @property
    def rate(self) -> float:
        """Bytes per second so far; 0 if nothing has been stored."""
        with self._lock:
            return self._bytes / self._busy if self._busy else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes stored so far."""
        return self._bytes

    @property
    def under_way(self) -> int:
        """Objects that are being stored."""
        return self._under_way

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """As the protocol says."""
        size = sum(memoryview(part).nbytes for part in parts)
        with self._lock:
            if not self._under_way:
                self._since = self._clock.monotonic()
            self._under_way += 1
        stored = 0
        try:
            self._store.put(key, parts)
            stored = size
            record(UPLOADED, size, repository=self._store.uri)
        finally:
            with self._lock:
                self._under_way -= 1
                self._bytes += stored
                if not self._under_way:
                    self._busy += self._clock.monotonic() - self._since

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
