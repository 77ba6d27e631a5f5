"""How numbers may be rounded before they are stored. Whatever a rule leaves of them is then stored without any further loss.

Both rules round to multiples of a power of two: bits that are zero cost next to nothing once they are coded, and a number that
was rounded before stays as it is, however often it is saved and restored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ...storage.coding import dtypes
from ...storage.coding.dtypes import MANTISSA
from ...storage.errors import StateError

if TYPE_CHECKING:
    from .numbers import Numbers


class Asked(Protocol):
    """What a user asks for: a rule, or something that finds one for each tensor."""

    def changes(self, dtype: str) -> bool:
        """Whether it does anything to numbers of a dtype."""

    def lets_follow(self, source: str, dtype: str) -> bool:
        """Whether what ``source`` is rounded to in ``dtype`` is the same before and after."""

    def choose(self, numbers: Callable[[], Numbers], before: Rule | None = None) -> Rule | None:
        """The rule for a tensor, of a dtype that is changed; None if it keeps every bit. ``numbers``: what this rank has of it.
        ``before``: the rule that was chosen in the save before."""


class Rule(Protocol):
    """A way to round. Its text is what people read in a version. ``block``: numbers that are looked at together."""

    @property
    def block(self) -> int:
        """See above."""

    def planes(self, dtype: str) -> tuple[int, ...]:
        """Byte planes that are worth coding afterwards: not noise alone. Ascending; the highest is one of them."""

    def round(self, values: Any, first: int) -> tuple[Any, Any]:
        """Torch tensors of the same shape: ``values`` (floats [rows, n], contiguous, all finite) rounded, and the largest error
        that is allowed of each (of any dtype). ``first``: the number of the first column along the last dimension of the whole
        tensor."""


@dataclass(frozen=True)
class MantissaBits:
    """Keep ``bits`` bits of each mantissa, *rounded to odd*: if anything was dropped, the last bit that is kept is set. The error
    is less than 2^-bits of the number (of the smallest normal one, for those below it). Nothing becomes zero, infinite or NaN
    that was not.

    With two bits more than a narrower float has, rounding to that afterwards gives what it would have given before (Boldo and
    Melquiond, "When double rounding is odd", 2005): 9 for bfloat16, 12 for float16.
    """

    bits: int
    block: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 1 <= self.bits <= max(MANTISSA.values()):
            raise StateError(f"{self} cannot be", remedy="keep 1 to 52 bits")

    def __str__(self) -> str:
        return f"MantissaBits({self.bits})"

    def changes(self, dtype: str) -> bool:
        return self.bits < MANTISSA.get(dtype, 0)

    def lets_follow(self, source: str, dtype: str) -> bool:
        return not self.changes(source) or self.bits >= MANTISSA[dtype] + 2

    def choose(self, numbers: Callable[[], Numbers], before: Rule | None = None) -> Rule | None:
        return self

    def planes(self, dtype: str) -> tuple[int, ...]:
        highest = dtypes.dtype(dtype).width - 1
        constant = MANTISSA[dtype] - self.bits + 1  # in a word whose sign was moved to its end, bits 1 to this one say nothing
        return (*range(min(constant // 8 + 1, highest)), highest)

    def round(self, values: Any, first: int) -> tuple[Any, Any]:
        import torch

        words = values.view(words_of(values.element_size()))
        kept = 1 << (MANTISSA[dtype_of(values)] - self.bits)
        some = ((words & (kept - 1)) != 0).to(words.dtype)
        made = ((words & -kept) | (some * kept)).view(values.dtype)
        tiny = torch.finfo(values.dtype).smallest_normal
        return made, values.abs().clamp(min=tiny) * 2.0**-self.bits


@dataclass(frozen=True)
class Blockwise:
    """Round to the nearest multiple of a power of two that goes with the largest number of a block: ``bits`` say which, with its
    sign. The error is at most 2^(1 - bits) of the block's largest number; what is smaller than that may become zero.

    A ``block`` is so many numbers one behind the other along the last dimension, counted from its beginning: which rank holds
    which rows says nothing of it. Where that dimension itself is cut, so may be a block; its parts are then blocks of their own,
    whose errors are smaller if anything.
    """

    bits: int = 8
    block: int = 256

    def __post_init__(self) -> None:
        if any(type(n) is not int for n in (self.bits, self.block)) or not (2 <= self.bits <= 24 and 8 <= self.block <= 1 << 16):
            raise StateError(f"{self} cannot be", remedy="2 to 24 bits, in blocks of 8 to 65,536")

    def __str__(self) -> str:
        return f"Blockwise({self.bits}, {self.block})"

    def changes(self, dtype: str) -> bool:
        return dtype in MANTISSA

    def lets_follow(self, source: str, dtype: str) -> bool:
        return False

    def choose(self, numbers: Callable[[], Numbers], before: Rule | None = None) -> Rule | None:
        return self

    def planes(self, dtype: str) -> tuple[int, ...]:
        return tuple(range(dtypes.dtype(dtype).width))

    def round(self, values: Any, first: int) -> tuple[Any, Any]:
        import torch

        (rows, n), start = values.shape, first % self.block
        blocks = torch.nn.functional.pad(values.double(), (start, -(start + n) % self.block)).view(rows, -1, self.block)
        largest = blocks.abs().amax(-1, keepdim=True)
        grid = _power_of_two(torch.frexp(largest)[1] + 1 - self.bits, values.dtype)
        # The largest number stays below its power of two, or else the next save would find another grid.
        most = 2 ** (self.bits - 1) - 1
        made = (blocks / grid).round_().clamp_(-most, most).mul_(grid)
        bound = (largest * 2.0 ** (1 - self.bits)).expand_as(made)
        return tuple(found.reshape(rows, -1)[:, start : start + n] for found in (made.to(values.dtype), bound))


def dtype_of(values: Any) -> str:
    """The format's name of a tensor's dtype."""
    return str(values.dtype).removeprefix("torch.")


def words_of(itemsize: int) -> Any:
    """The torch dtype of integers of so many bytes."""
    import torch

    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]


def _power_of_two(exponents: Any, dtype: Any) -> Any:
    """Powers of two, exactly (float64), none of them smaller than the smallest positive number of a dtype."""
    import torch

    limits = torch.finfo(dtype)
    powers = exponents.long().clamp(min=round(math.log2(limits.smallest_normal) + math.log2(limits.eps)))
    small = 1 << (powers + 1074).clamp(0, 52)  # what is below the normal numbers is a bit in the mantissa
    return torch.where(powers < -1022, small, powers + 1023 << 52).view(torch.float64)
