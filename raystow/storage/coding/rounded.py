"""The effect of rounding on a tensor, shown to users; it proves that the error bound was kept."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce


@dataclass(frozen=True, slots=True)
class Rounded:
    """``rule``: how it was rounded; several rules, if ranks chose differently. ``error``: the largest difference to the numbers
    given to ``save``; ``relative``: the largest difference divided by the number. ``signal`` and ``noise``: the sums of the
    squares of all numbers, and of all differences. Infinities and NaNs are not changed and not counted. ``spared``: bytes of the
    mantissas that rounding made zero."""

    rule: str
    error: float
    relative: float
    signal: float
    noise: float
    spared: int

    @property
    def sqnr(self) -> float | None:
        """The signal divided by the noise, in decibels; None if nothing was changed."""
        ratio = self.signal / self.noise if self.noise > 0 else 0.0
        return 10 * math.log10(ratio) if 0 < ratio < math.inf else None

    def __or__(self, other: Rounded) -> Rounded:
        """The effect on two parts of a tensor together."""
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
