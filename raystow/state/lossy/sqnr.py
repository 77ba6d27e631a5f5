"""``Sqnr``: the rule that measures each tensor and chooses the rounding that takes the fewest bytes for a given noise."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ...storage.coding import dtypes
from ...storage.coding.chunk import ChunkEncoder
from ...storage.coding.dtypes import MANTISSA
from ...storage.coding.rounded import Rounded
from ...storage.errors import StateError
from . import rounded_chunk
from .rules import Blockwise, MantissaBits, Rule
from .tensor_values import Numbers

if TYPE_CHECKING:
    from torch import Tensor

_BIT = 20 * math.log10(2)  # decibels of one bit
_BLOCKS = (64, 256)
_SLACK = 1.0
"""Decibels by which a sample may miss the goal: all numbers are measured afterwards."""
_SPARED = 2
"""Bits of each mantissa that are zero after every rule that is chosen here, unlike those of numbers that were never rounded."""


@dataclass(frozen=True)
class Sqnr:
    """Choose for each tensor the rule that takes the fewest bytes for a ratio of signal to quantization noise (SQNR).

    The rules are ``MantissaBits(n)`` and, for first moments only, ``Blockwise(n, block)``. Every rank measures all of its numbers
    of a tensor. Numbers that were rounded before are not changed; a tensor that no rule suits is stored with every bit.

    Args:
        db: The least ratio in decibels, 10 to 120.
        blocks: The block sizes to try.

    Raises:
        StateError: An argument is not in its range.
    """

    db: float
    blocks: tuple[int, ...] = _BLOCKS

    def __post_init__(self) -> None:
        if type(self.db) not in (int, float) or not 10 <= self.db <= 120:
            raise StateError(f"{self} is invalid", remedy="ask for 10 to 120 decibels")
        if type(self.blocks) is not tuple:
            raise StateError(f"blocks is {self.blocks!r:.80}", subject=str(self), remedy="give a tuple of sizes")
        for block in self.blocks:
            Blockwise(2, block)  # or it says why not

    def __str__(self) -> str:
        return f"Sqnr({self.db})" if self.blocks == _BLOCKS else f"Sqnr({self.db}, {self.blocks})"

    def changes(self, dtype: str) -> bool:
        return self._least <= MANTISSA.get(dtype, 0) - _SPARED

    def preserves_cast(self, source: str, dtype: str) -> bool:
        """Does not depend on the numbers, so that all ranks agree."""
        return not self.changes(source) or (not self.blocks and self._least >= MANTISSA[dtype] + 2)

    @property
    def _least(self) -> int:
        """Mantissa bits to try first: at most one less than any numbers need."""
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

    def _candidates(self, sample: Tensor, dtype: str) -> Iterator[Rule]:
        """The rule of fewest bits of each kind that suits the sample, by stored bytes; then those with one more bit."""
        most = MANTISSA[dtype] - _SPARED
        kinds: list[tuple[Callable[[int], Rule], range]] = [(MantissaBits, range(self._least, most + 1))]
        for block in self.blocks:
            kinds.append((functools.partial(Blockwise, block=block), range(2, min(24, most + 2) + 1)))
        encoder, suited = ChunkEncoder(sample.nbytes), []
        for rule, bits in kinds:
            fewest = bisect.bisect_left(bits, self.db - _SLACK, key=lambda n, rule=rule: _sample_sqnr(rule(n), sample, dtype))  # type: ignore[misc]
            suited.append(map(rule, bits[fewest:]))
        for rules in itertools.zip_longest(*suited):
            found = [rule for rule in rules if rule is not None]
            yield from sorted(found, key=lambda rule: _stored(rule, sample, dtype, encoder))


@dataclass(frozen=True)
class Settled:
    """No number has more than ``bits`` bits of mantissa: they were rounded before and are not changed."""

    bits: int
    block: ClassVar[int] = 1

    def __str__(self) -> str:
        return f"Settled({self.bits})"

    def planes(self, dtype: str) -> tuple[int, ...]:
        return MantissaBits(max(1, self.bits)).planes(dtype)

    def round(self, values: Tensor, first: int) -> tuple[Tensor, Tensor]:
        return values, values.new_zeros(()).expand_as(values)


def _measured(rule: Rule, numbers: Numbers) -> float:
    """Decibels of all numbers."""
    import torch

    found = [rounded_chunk.rounded(rule, words, numbers.dtype, first)[1] for words, first in numbers.chunks()]
    return _decibels(rounded_chunk.check(numbers.name, rule, [rounded_chunk.combine(torch.stack(found)).cpu()]))


def _sample_sqnr(rule: Rule, sample: Tensor, dtype: str) -> float:
    _, findings = rounded_chunk.rounded(rule, sample, dtype)
    return _decibels(rounded_chunk.check("a sample", rule, [findings]))


def _stored(rule: Rule, sample: Tensor, dtype: str, encoder: ChunkEncoder) -> int:
    """Bytes of the sample after rounding and encoding."""
    words, _ = rounded_chunk.rounded(rule, sample, dtype)
    return encoder.encode(words.numpy().view(np.uint8).reshape(-1), dtypes.dtype(dtype))[0].size


def _decibels(found: Rounded) -> float:
    """Signal to noise; infinity without noise."""
    return math.inf if not found.noise else found.sqnr or 0.0


def _width(words: Tensor, dtype: str) -> int:
    """The most mantissa bits of any finite number, counted as for normal numbers."""
    import torch

    values = words.view(getattr(torch, dtype))
    finite = values.masked_fill(~values.isfinite(), 0.0).double()
    return 52 - int(rounded_chunk.zeros(finite.frexp()[0].view(torch.int64), "float64").amin())
