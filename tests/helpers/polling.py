"""Waiting for other threads or processes, by a condition and a deadline, never for a fixed time."""

from __future__ import annotations

from collections.abc import Callable

from raystow.storage.runtime.clock import SYSTEM


def wait_until(
    condition: Callable[[], object], what: str | Callable[[], str], seconds: float = 120.0, *, pause: float = 0.05
) -> None:
    """Return when ``condition()`` is true; raise ``AssertionError`` with ``what`` after ``seconds``."""
    end = SYSTEM.monotonic() + seconds
    while not condition():
        if SYSTEM.monotonic() >= end:
            raise AssertionError(f"not within {seconds:.0f} s: {what if isinstance(what, str) else what()}")
        SYSTEM.sleep(pause)
