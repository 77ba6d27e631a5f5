"""Whether a node worker is used. Ray calls a node busy as long as any actor is there: one that nobody uses has to end, so that an
autoscaler can give the node back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ..storage.runtime.clock import Clock

AFTERWARDS = 30.0
"""Seconds for which a node worker stays after its start, and after a process or another node has used it."""


class Usage:
    """Thread-safe. Begins with the start of the node worker.

    Attributes:
        clock: Tells how much time has passed.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock, self._lock = clock, threading.Lock()
        self._visits, self._ended = 0, False
        self._until = clock.monotonic() + AFTERWARDS
        self._kept: dict[str, float] = {}  # repository URI -> until when the memory is kept for its next training

    @contextlib.contextmanager
    def visit(self) -> Iterator[None]:
        """Note a connection or a request for the block."""
        with self._lock:
            self._visits += 1
        try:
            yield
        finally:
            with self._lock:
                self._visits -= 1
                self._extend()

    def began(self, uri: str) -> None:
        """Note a training process of the repository at ``uri``, within a ``visit``. Its training has begun again: nothing is kept
        any longer for the sake of processes that left before."""
        with self._lock:
            self._kept.pop(uri, None)

    def left(self, uri: str, seconds: float) -> None:
        """Note that a training process has left, within the same ``visit``: its memory is kept for so many ``seconds``."""
        with self._lock:
            until = self.clock.monotonic() + seconds
            self._kept[uri] = max(until, self._kept.get(uri, until))

    def expect(self) -> bool:
        """A process will connect in a moment. Returns False if the node worker has ended: it accepts nobody any more."""
        with self._lock:
            self._extend()
            return not self._ended

    @property
    def visits(self) -> int:
        """How many connections and requests are open."""
        with self._lock:
            return self._visits

    @property
    def over(self) -> bool:
        """Whether nobody uses the node worker, nor is likely to soon."""
        with self._lock:
            return self._over

    def end(self) -> bool:
        """End the node worker if it is not used. Returns whether it has ended."""
        with self._lock:
            self._ended = self._over
            return self._ended

    @property
    def _over(self) -> bool:
        unused = not self._visits and self.clock.monotonic() >= max([self._until, *self._kept.values()])
        return self._ended or unused

    def _extend(self) -> None:
        self._until = max(self._until, self.clock.monotonic() + AFTERWARDS)
