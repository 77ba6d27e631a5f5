"""The coverage sum: shows without a list of boxes that the chunks of a save are all elements of all tensors, each once."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from ..storage.coding.digest import stored_digest
from ..storage.format.boxes import Box

PRIME, _BITS = (1 << 32) - 5, 32
_LOWER, _WORD = (1 << _BITS) - 1, (1 << 64) - 1


def coverage(name: str, dtype: str, shape: Sequence[int], box: Box | None = None) -> int:
    """Return a term of the coverage sum: that of one box of a tensor; without a box, of all of it. Add terms by ``total``.

    The terms of all stored chunks must add up to those of all tensors. Each axis gives each coordinate a random number, and a box
    counts as a product, as in ``storage.format.boxes.tile``: a gap and an overlap are found without listing boxes, and so is a
    tensor that no rank stores, or two ranks store. Chance hides an error once in some 2**30; readers check all boxes again.

    A term is two numbers modulo a prime of 32 bits: the lower one is what the box counts, the upper one is that times a number of
    the name. So ``differing`` finds the name of a tensor if no other one is wrong.
    """
    count, mark = _weight(name, dtype, tuple(shape))
    seed = count
    for axis, (low, size) in enumerate(zip(*box, strict=True) if box is not None else ((0, size) for size in shape)):
        count = count * (_place(seed, axis, low + size) - _place(seed, axis, low)) % PRIME
    return count | (count * mark % PRIME) << _BITS


def total(terms: Iterable[int]) -> int:
    """Return the sum of terms or sums."""
    lower = upper = 0
    for term in terms:
        lower, upper = lower + (term & _LOWER), upper + (term >> _BITS)
    return lower % PRIME | upper % PRIME << _BITS


def differing(covered: int, expected: int, names: Iterable[str]) -> list[str]:
    """Return which of ``names`` may alone account for two sums that differ; more than one only by chance."""
    lower, upper = ((covered >> shift & _LOWER) - (expected >> shift & _LOWER) for shift in (0, _BITS))
    return [name for name in names if (lower * mark(name) - upper) % PRIME == 0] if lower % PRIME else []


@functools.lru_cache(maxsize=1 << 16)
def _weight(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
    return int.from_bytes(stored_digest(f"{name}\0{dtype}\0{shape}".encode())[:4], "little") % PRIME | 1, mark(name)


def counted(terms: int) -> int:
    """What the boxes of a term or sum count, modulo ``PRIME``."""
    return terms & _LOWER


def mark(name: str) -> int:
    """A number of 32 bits of a name."""
    return int.from_bytes(stored_digest(name.encode())[:4], "little") % PRIME


def _place(seed: int, axis: int, coordinate: int) -> int:
    """The number of a coordinate: the finalizer of splitmix64."""
    word = (seed + axis * 0xD1B54A32D192ED03 + (coordinate + 1) * 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _WORD
    return (word ^ word >> 31) % PRIME
