"""What rules would make of a tensor: told by statistics of a sample of its numbers, and tried on that."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ...storage.coding import dtypes
from ...storage.coding.chunk import Encoder
from ...storage.coding.rounded import Rounded
from . import rounding
from .rules import Rule


class Trials:
    """``words``: those of the sample, torch [runs, n] in host memory. ``db``: decibels of signal by noise that are to be left."""

    def __init__(self, words: Any, dtype: str, db: float) -> None:
        self._words, self._dtype, self._db = words, dtype, db
        self._encoder = Encoder(words.nbytes)

    def fewest(self, rule: Callable[[int], Rule], bits: range, block: int) -> int:
        """Bits, of so many, with which ``rule`` leaves enough; one more than the last of them if none does."""
        found = min(max(self._guess(block), bits.start), bits.stop)
        while found > bits.start and self._suits(rule(found - 1)):
            found -= 1
        while found < bits.stop and not self._suits(rule(found)):
            found += 1
        return found

    def stored(self, rule: Rule) -> int:
        """Bytes, coded on a CPU."""
        made, _ = rounding.rounded(rule, self._words, self._dtype)
        return self._encoder.encode(made.numpy().view(np.uint8).reshape(-1), dtypes.dtype(self._dtype))[0].size

    def _suits(self, rule: Rule) -> bool:
        _, findings = rounding.rounded(rule, self._words, self._dtype)
        return decibels(rounding.read("a sample", rule, [findings])) >= self._db

    def _guess(self, block: int) -> int:
        """Bits. A grid goes with the power of two above the largest number of its block. If errors are spread evenly over it, the
        mean of their squares is a third of 4^-bits times that of these powers. How far the latter is above the mean square of the
        numbers is a matter of their range and of outliers, which smaller blocks keep to themselves. A mantissa is a block of one
        number."""
        import torch

        values = finite(self._words, self._dtype)
        if not (largest := values.abs().amax()):
            return 0
        values /= largest  # no square is then too large or small for its dtype
        tops = torch.nn.functional.pad(values, (0, -values.shape[-1] % block)).unflatten(-1, (-1, block)).abs().amax(-1)
        powers = torch.where(tops > 0, 4.0 ** tops.frexp()[1], 0.0)
        return math.ceil(math.log2(10 ** (self._db / 10) * float(powers.mean() / values.square().mean()) / 3) / 2)


def decibels(found: Rounded) -> float:
    """Of signal by noise; infinity if there is none."""
    return math.inf if not found.noise else found.sqnr or 0.0


def finite(words: Any, dtype: str) -> Any:
    """The numbers in float64; zeros for infinity and NaN."""
    import torch

    values = words.view(getattr(torch, dtype))
    return values.masked_fill(~values.isfinite(), 0.0).double()
