"""The only source of time and randomness, so that a test can step through hours in microseconds.

A lint rule bans ``time.time``, ``time.sleep``, ``random``, ``secrets`` and ``uuid`` in every other module.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Iterator
from typing import Protocol


class Clock(Protocol):
    """Time and randomness. Tests and the simulation replace the one of the system."""

    def now(self) -> float:
        """Wall-clock seconds since 1970-01-01 UTC; may jump."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back."""

    def sleep(self, seconds: float) -> None:
        """Block this thread."""

    def token(self) -> str:
        """16 fresh random hexadecimal digits."""


class SystemClock:
    """The real clock and the operating system's randomness."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def token(self) -> str:
        return secrets.token_hex(8)


SYSTEM: Clock = SystemClock()


@contextlib.contextmanager
def same_random_state() -> Iterator[None]:
    """Restore the state of Python's generator afterwards. Numbers that other threads draw meanwhile are drawn again."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
