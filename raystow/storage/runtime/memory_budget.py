"""A budget of bytes that threads share: a thread that would exceed it waits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class MemoryBudget:
    """Admits work by its size in bytes. Work larger than the whole budget is admitted alone."""

    def __init__(self, total: int = 0) -> None:
        self._total, self._used = total, 0
        self._changed = threading.Condition()

    @property
    def used(self) -> int:
        """Acquired bytes."""
        return self._used

    @property
    def total(self) -> int:
        """The budget in bytes."""
        return self._total

    def grow(self, nbytes: int) -> None:
        """Change the budget by ``nbytes``, which may be negative."""
        with self._changed:
            self._total += nbytes
            self._changed.notify_all()

    def acquire(self, nbytes: int, relieve: Callable[[], None] = lambda: None) -> None:
        """Wait until ``nbytes`` fit. ``relieve`` is called repeatedly meanwhile, and may cause bytes to be released."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._fits(nbytes), timeout=0.05):
                    self._used += nbytes
                    return
            relieve()  # repeatedly, since other threads may have acquired more

    def release(self, nbytes: int) -> None:
        """Release acquired bytes."""
        with self._changed:
            self._used -= nbytes
            self._changed.notify_all()

    @contextlib.contextmanager
    def taking(self, nbytes: int) -> Iterator[None]:
        """Acquire ``nbytes`` for the block."""
        self.acquire(nbytes)
        try:
            yield
        finally:
            self.release(nbytes)

    def _fits(self, nbytes: int) -> bool:
        return self._used == 0 or self._used + nbytes <= self._total
