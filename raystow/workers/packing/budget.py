"""A budget of bytes that many threads draw on: whoever would exceed it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Budget:
    """Admits work by its size in bytes. What is larger than the whole budget is admitted when nothing else is."""

    def __init__(self, total: int = 0) -> None:
        self._total, self._used = total, 0
        self._changed = threading.Condition()

    @property
    def used(self) -> int:
        """Bytes that are held."""
        return self._used

    @property
    def total(self) -> int:
        """Bytes that may be."""
        return self._total

    def grow(self, nbytes: int) -> None:
        """Add to the budget (or take from it, if negative)."""
        with self._changed:
            self._total += nbytes
            self._changed.notify_all()

    def acquire(self, nbytes: int, relieve: Callable[[], None]) -> None:
        """Wait until ``nbytes`` fit. ``relieve`` is called while waiting: it sees to it that what is held gets released."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._fits(nbytes), timeout=0.0 if self._fits(nbytes) else 0.05):
                    self._used += nbytes
                    return
            relieve()  # again and again: others may have put more aside meanwhile

    def release(self, nbytes: int) -> None:
        """Give back what was acquired."""
        with self._changed:
            self._used -= nbytes
            self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        return self._used == 0 or self._used + nbytes <= self._total
