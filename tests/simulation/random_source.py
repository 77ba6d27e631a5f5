"""The one source of chance in a simulated world."""

from __future__ import annotations

import random  # noqa: TID251 - the clocks' randomness is made from it here
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class RandomSource:
    """Seeded. What is drawn depends on the seed and the order of draws alone, on every machine."""

    def __init__(self, seed: int | str) -> None:
        self._seed, self._random = seed, random.Random(seed)

    def fork(self, name: str) -> RandomSource:
        """RandomSource of their own, so that draws elsewhere do not disturb them."""
        return RandomSource(f"{self._seed}/{name}")

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self._random.random()

    def number(self, low: int, high: int) -> int:
        """From ``low`` to ``high``, both included."""
        return low + int(self._random.random() * (high - low + 1))

    def choice(self, options: Sequence[T]) -> T:
        return options[int(self._random.random() * len(options))]

    def around(self, typical: float) -> float:
        """Mostly near ``typical``, sometimes many times as much."""
        return typical * (0.25 + self._random.expovariate(1.0))

    def token(self) -> str:
        """16 hexadecimal digits."""
        return f"{self._random.getrandbits(64):016x}"
