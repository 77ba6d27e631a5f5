"""What rounding has done to a tensor that was stored with less than all its bits: for people, and proof that a bound held."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce


@dataclass(frozen=True, slots=True)
class Rounded:
    """``rule``: by which; all of them, where ranks chose differently. ``error``: the largest difference to what was given to
    ``save``; ``relative``: the largest one by the number itself. ``signal`` and ``noise``: the sums of the squares of all
    numbers, and of all differences. Numbers that are infinite or NaN stay as they are and count nowhere. ``spared``: bytes of the
    mantissas that are zeros now and were not."""

    rule: str
    error: float
    relative: float
    signal: float
    noise: float
    spared: int

    @property
    def sqnr(self) -> float | None:
        """Signal by noise, in decibels; None if nothing was changed."""
        ratio = self.signal / self.noise if self.noise > 0 else 0.0
        return 10 * math.log10(ratio) if 0 < ratio < math.inf else None

    def __or__(self, other: Rounded) -> Rounded:
        """Of both parts of a tensor."""
        rules = {*self.rule.split(" and "), *other.rule.split(" and ")}
        return Rounded(
            " and ".join(sorted(rules)),
            max(self.error, other.error),
            max(self.relative, other.relative),
            self.signal + other.signal,
            self.noise + other.noise,
            self.spared + other.spared,
        )


def together(parts: Iterable[Rounded]) -> Rounded:
    """Of all parts of a tensor, of which there is at least one."""
    return reduce(Rounded.__or__, parts)
