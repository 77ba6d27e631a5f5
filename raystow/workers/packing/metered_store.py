"""Measures the upload throughput of a store."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from ...storage.object_store import Buffer, ObjectStore
from ...storage.runtime.clock import Clock
from ...storage.runtime.metrics import UPLOADED, record


class Metered:
    """Wraps an ``ObjectStore`` and measures ``put``: bytes per second of the time in which at least one was in progress."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = self._busy = 0.0
        self._bytes = 0

    @property
    def rate(self) -> float:
        """Bytes per second; 0 if nothing has been stored."""
        with self._lock:
            return self._bytes / self._busy if self._busy else 0.0

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self._bytes

    @property
    def under_way(self) -> int:
        """The number of objects that are being stored."""
        return self._under_way

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """See ``ObjectStore.put``."""
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
