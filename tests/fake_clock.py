"""A clock that goes only when it is told to, and never makes anyone wait."""

from __future__ import annotations


class FakeClock:
    """``time`` is both wall clock and monotonic; ``sleep`` advances it. Tokens count up."""

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
