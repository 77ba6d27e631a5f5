"""The rule that looks at each tensor: it is told how much noise there may be, and finds what takes the fewest bytes for that."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ...storage.coding.dtypes import MANTISSA
from ...storage.errors import StateError
from . import rounding
from .numbers import Numbers
from .rules import Blockwise, MantissaBits, Rule
from .trials import Trials, decibels, finite

_BIT = 20 * math.log10(2)  # decibels that a bit is worth
_BLOCKS = (64, 256)
_SLACK = 1.0
"""Decibels by which a sample may be short of what is asked for, if all numbers are not."""
_SPARED = 2
"""Bits of each mantissa that are zeros after any rule that is chosen here. Numbers that nobody has rounded do not all end so."""


@dataclass(frozen=True)
class Sqnr:
    """For each tensor whichever of ``MantissaBits(n)`` and ``Blockwise(n, block)``, for the sizes of ``blocks``, stores it in the
    fewest bytes with at least ``db`` decibels of signal by noise (SQNR). Blocks are tried for first moments alone: of anything
    else no number becomes zero, and each error has a bound relative to the number itself.

    Every rank measures all numbers that it holds of a tensor before it stores any of them. Those that have been rounded before,
    by whatever rule, stay as they are (``Settled``); what no rule suits is stored with every bit.
    """

    db: float
    blocks: tuple[int, ...] = _BLOCKS

    def __post_init__(self) -> None:
        if type(self.db) not in (int, float) or not 10 <= self.db <= 120:
            raise StateError(f"{self} cannot be", remedy="ask for 10 to 120 decibels")
        if type(self.blocks) is not tuple:
            raise StateError(f"blocks={self.blocks!r:.80} cannot be", subject=str(self), remedy="give a tuple of their sizes")
        for block in self.blocks:
            Blockwise(2, block)  # or it says why not

    def __str__(self) -> str:
        return f"Sqnr({self.db})" if self.blocks == _BLOCKS else f"Sqnr({self.db}, {self.blocks})"

    def changes(self, dtype: str) -> bool:
        return self._least <= MANTISSA.get(dtype, 0) - _SPARED

    def lets_follow(self, source: str, dtype: str) -> bool:
        """Said without a look at numbers, so that all ranks say the same."""
        return not self.changes(source) or (not self.blocks and self._least >= MANTISSA[dtype] + 2)

    @property
    def _least(self) -> int:
        """Bits of mantissas that are kept whatever the numbers are: up to one less than numbers of any kind need."""
        return max(1, math.ceil(self.db / _BIT) - 2)

    def choose(self, numbers: Callable[[], Numbers], before: Rule | None = None) -> Rule | None:
        held = numbers()
        sample, most = held.sample(), MANTISSA[held.dtype] - _SPARED
        if not sample.numel():
            return None
        if _width(sample, held.dtype) <= most:
            width = max(_width(words, held.dtype) for words, _ in held.chunks())
            if width <= most:
                return Settled(width)
        if isinstance(before, MantissaBits | Blockwise) and self.db <= _measured(before, held) < self.db + 1.5 * _BIT:
            return before
        return next((rule for rule in self._candidates(sample, held.dtype) if _measured(rule, held) >= self.db), None)

    def _candidates(self, sample: Any, dtype: str) -> Iterator[Rule]:
        """What suits a sample: of each kind the rule of fewest bits, in the order of bytes; then those with a bit more."""
        trials, most = Trials(sample, dtype, self.db - _SLACK), MANTISSA[dtype] - _SPARED
        kinds: list[tuple[Callable[[int], Rule], range, int]] = [(MantissaBits, range(self._least, most + 1), 1)]
        for block in self.blocks:
            kinds.append((functools.partial(Blockwise, block=block), range(2, min(24, most + 2) + 1), block))
        suited = [map(rule, range(trials.fewest(rule, bits, block), bits.stop)) for rule, bits, block in kinds]
        for rules in itertools.zip_longest(*suited):
            yield from sorted((rule for rule in rules if rule is not None), key=trials.stored)


@dataclass(frozen=True)
class Settled:
    """No number has more than ``bits`` bits of mantissa: they were rounded before, and stay as they are."""

    bits: int
    block: ClassVar[int] = 1

    def __str__(self) -> str:
        return f"Settled({self.bits})"

    def planes(self, dtype: str) -> tuple[int, ...]:
        return MantissaBits(max(1, self.bits)).planes(dtype)

    def round(self, values: Any, first: int) -> tuple[Any, Any]:
        return values, values.new_zeros(()).expand_as(values)


def _measured(rule: Rule, numbers: Numbers) -> float:
    """Decibels, of all numbers."""
    import torch

    found = [rounding.rounded(rule, words, numbers.dtype, first)[1] for words, first in numbers.chunks()]
    return decibels(rounding.read(numbers.name, rule, [rounding.together(torch.stack(found)).cpu()]))


def _width(words: Any, dtype: str) -> int:
    """The most bits of mantissa that any of the finite numbers has, counted as if it were not below the normal ones."""
    import torch

    return 52 - int(rounding.zeros(finite(words, dtype).frexp()[0].view(torch.int64), "float64").amin())
