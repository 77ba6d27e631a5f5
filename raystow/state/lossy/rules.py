"""Rules that round numbers before they are stored. The rounded numbers are then stored without further loss.

Both rules round to multiples of a power of two: bits that are zero compress to almost nothing, and a number that was rounded
before is not changed again, however often it is saved and restored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from ...storage.coding import dtypes
from ...storage.coding.dtypes import MANTISSA
from ...storage.errors import StateError
from .tensor_values import Numbers, dtype_name, words_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch import dtype as TorchDtype


class RuleSelector(Protocol):
    """A rule, or a way to choose one for each tensor."""

    def changes(self, dtype: str) -> bool:
        """Whether it changes numbers of a dtype."""

    def preserves_cast(self, source: str, dtype: str) -> bool:
        """Whether rounding ``source`` to ``dtype`` gives the same numbers before and after this rule."""

    def choose(self, numbers: Callable[[], Numbers], before: Rule | None = None) -> Rule | None:
        """The rule for a tensor, None to keep every bit. ``numbers``: this rank's part. ``before``: the previous save's rule."""


class Rule(Protocol):
    """A way to round. Its text is stored with a version. ``block``: how many numbers are rounded together."""

    @property
    def block(self) -> int:
        """See above."""

    def planes(self, dtype: str) -> tuple[int, ...]:
        """Byte planes that compress afterwards, ascending; the highest is one of them."""

    def round(self, values: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Torch tensors of the same shape: ``values`` (floats [rows, n], contiguous, all finite) rounded, and the largest error
        that is allowed of each (of any dtype). ``first``: the number of the first column along the last dimension of the whole
        tensor."""


@dataclass(frozen=True)
class MantissaBits:
    """Keep some bits of each mantissa.

    Numbers are *rounded to odd*: if any dropped bit was set, the last kept bit is set. The error is less than 2**-bits of the
    number (of the smallest normal number, for subnormal ones). No number becomes zero, infinite or NaN. Rounding the result to
    a narrower float gives what it would have given before, if two bits more than that float has are kept: 9 for bfloat16, 12 for
    float16 (Boldo and Melquiond, "When double rounding is odd", 2005).

    Args:
        bits: The bits of the mantissa to keep, 1 to 52.

    Raises:
        StateError: ``bits`` is not in that range.
    """

    bits: int
    block: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 1 <= self.bits <= max(MANTISSA.values()):
            raise StateError(f"{self} is invalid", remedy="keep 1 to 52 bits")

    def __str__(self) -> str:
        return f"MantissaBits({self.bits})"

    def changes(self, dtype: str) -> bool:
        return self.bits < MANTISSA.get(dtype, 0)

    def preserves_cast(self, source: str, dtype: str) -> bool:
        return not self.changes(source) or self.bits >= MANTISSA[dtype] + 2

    def choose(self, numbers: Callable[[], Numbers], before: Rule | None = None) -> Rule | None:
        return self

    def planes(self, dtype: str) -> tuple[int, ...]:
        highest = dtypes.dtype(dtype).width - 1
        constant = MANTISSA[dtype] - self.bits + 1  # in a word whose sign was moved to its end, bits 1 to this one say nothing
        return (*range(min(constant // 8 + 1, highest)), highest)

    def round(self, values: Tensor, first: int) -> tuple[Tensor, Tensor]:
        import torch

        words = values.view(words_of(values.element_size()))
        kept = 1 << (MANTISSA[dtype_name(values.dtype)] - self.bits)
        some = ((words & (kept - 1)) != 0).to(words.dtype)
        made = ((words & -kept) | (some * kept)).view(values.dtype)
        tiny = torch.finfo(values.dtype).smallest_normal
        return made, values.abs().clamp(min=tiny) * 2.0**-self.bits


@dataclass(frozen=True)
class Blockwise:
    """Round blocks of numbers to multiples of one power of two each.

    The power depends on the largest number of the block. The error is at most 2**(1 - bits) of that number; smaller numbers may
    become zero. Blocks are counted along the last dimension of the whole tensor, so they do not depend on how ranks shard the
    other dimensions. Where the last dimension is cut, each part of a block is a block of its own.

    Args:
        bits: Bits for each multiple with its sign, 2 to 24.
        block: Numbers in a block, 8 to 65,536.

    Raises:
        StateError: An argument is not in its range.
    """

    bits: int = 8
    block: int = 256

    def __post_init__(self) -> None:
        if any(type(n) is not int for n in (self.bits, self.block)) or not (2 <= self.bits <= 24 and 8 <= self.block <= 1 << 16):
            raise StateError(f"{self} is invalid", remedy="use 2 to 24 bits, in blocks of 8 to 65,536")

    def __str__(self) -> str:
        return f"Blockwise({self.bits}, {self.block})"

    def changes(self, dtype: str) -> bool:
        return dtype in MANTISSA

    def preserves_cast(self, source: str, dtype: str) -> bool:
        return False

    def choose(self, numbers: Callable[[], Numbers], before: Rule | None = None) -> Rule | None:
        return self

    def planes(self, dtype: str) -> tuple[int, ...]:
        return tuple(range(dtypes.dtype(dtype).width))

    def round(self, values: Tensor, first: int) -> tuple[Tensor, Tensor]:
        import torch

        (rows, n), start = values.shape, first % self.block
        blocks = torch.nn.functional.pad(values.double(), (start, -(start + n) % self.block)).view(rows, -1, self.block)
        largest = blocks.abs().amax(-1, keepdim=True)
        grid = _power_of_two(torch.frexp(largest)[1] + 1 - self.bits, values.dtype)
        # The largest number stays below its power of two: otherwise the next save would use another power.
        most = 2 ** (self.bits - 1) - 1
        made = (blocks / grid).round_().clamp_(-most, most).mul_(grid)
        bound = (largest * 2.0 ** (1 - self.bits)).expand_as(made)
        return tuple(found.reshape(rows, -1)[:, start : start + n] for found in (made.to(values.dtype), bound))


def _power_of_two(exponents: Tensor, dtype: TorchDtype) -> Tensor:
    """Powers of two, exactly (float64), none of them smaller than the smallest positive number of a dtype."""
    import torch

    limits = torch.finfo(dtype)
    powers = exponents.long().clamp(min=round(math.log2(limits.smallest_normal) + math.log2(limits.eps)))
    small = 1 << (powers + 1074).clamp(0, 52)  # what is below the normal numbers is a bit in the mantissa
    return torch.where(powers < -1022, small, powers + 1023 << 52).view(torch.float64)
