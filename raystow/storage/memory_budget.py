"""A number of bytes that several threads share."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class MemoryBudget:
    """Lets threads work while they take at most ``limit`` bytes together. One that takes more works alone."""

    def __init__(self, limit: int) -> None:
        self._limit, self._taken = limit, 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taking(self, nbytes: int) -> Iterator[None]:
        """Wait until so many bytes are free, and take them for the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + nbytes <= self._limit)
            self._taken += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._taken -= nbytes
                self._changed.notify_all()
