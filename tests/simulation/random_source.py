"""The only source of randomness in a simulated world."""

from __future__ import annotations

import random  # noqa: TID251 - the clocks' randomness is made from it here
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class RandomSource:
    """A seeded random source. Its numbers depend only on the seed and the order of draws, on every machine."""

    def __init__(self, seed: int | str) -> None:
        self._seed, self._random = seed, random.Random(seed)

    def fork(self, name: str) -> RandomSource:
        """Return an independent source, whose numbers do not depend on other draws."""
        return RandomSource(f"{self._seed}/{name}")

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self._random.random()

    def number(self, low: int, high: int) -> int:
        """Return an integer from ``low`` to ``high``, both included."""
        return low + int(self._random.random() * (high - low + 1))

    def choice(self, options: Sequence[T]) -> T:
        return options[int(self._random.random() * len(options))]

    def around(self, typical: float) -> float:
        """Return a duration that is mostly near ``typical`` and sometimes many times longer."""
        return typical * (0.25 + self._random.expovariate(1.0))

    def token(self) -> str:
        """Return 16 hexadecimal digits."""
        return f"{self._random.getrandbits(64):016x}"
