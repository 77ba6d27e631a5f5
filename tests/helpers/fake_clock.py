"""A clock that advances only when a test advances it, and whose ``sleep`` returns immediately."""

from __future__ import annotations


class FakeClock:
    """``time`` is wall clock and monotonic clock; ``sleep`` advances it. Tokens are consecutive numbers."""

    def __init__(self) -> None:
        self.time, self.tokens = 0.0, 0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def token(self) -> str:
        self.tokens += 1
        return f"{self.tokens:016x}"
