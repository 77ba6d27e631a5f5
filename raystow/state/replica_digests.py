"""Digests of ranges that several ranks hold, and what two of them tell of the first element that differs.

The digest of a range is its ``raw_digest``. That is public and linear in the words, so a change of one word changes it in any
case, and shows which word it was: the difference of two sums, divided by the keys of the right word, is a difference of words.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..storage.coding.digest import BLOCK, WORD_KEYS, block_key, finish, raw_digest, unfinished
from .replica_groups import ReplicaRange

_MASK = (1 << 64) - 1


class RangeDigest(NamedTuple):
    """The digests of a range, and of its first element."""

    whole: int
    first: int


def range_digest(one: ReplicaRange) -> RangeDigest:
    """The digests of a range in host memory."""
    found = one.bytes()
    return RangeDigest(raw_digest(found), _first(found[: one.dtype.itemsize].tobytes()))


def _first(data: bytes) -> int:
    """``raw_digest`` of some words, which takes less time for so few."""
    total = sum(int.from_bytes(data[i : i + 4], "little") * key for i, key in zip(range(0, len(data), 4), _FIRST, strict=False))
    return int(finish(total * block_key(0), len(data)))


_FIRST = tuple(map(int, WORD_KEYS[:4]))


def first_difference(one: RangeDigest, other: RangeDigest, *, nbytes: int, itemsize: int) -> tuple[int, bool] | None:
    """The first element that differs between two ranges of one size, and whether it is known that no further one does.

    None if it is not known: several words differ, and the first element does not. If a single word differs it is found: that two
    ranges with several differences look so has a probability of 2**-13.
    """
    difference = (unfinished(one.whole, nbytes) - unfinished(other.whole, nbytes)) & _MASK
    found = _single_word(difference, -(-nbytes // 4))
    if found is not None:
        word, change = found
        lowest = (change & -change).bit_length() - 1  # in the lowest byte that differs
        return (4 * word + lowest // 8) // itemsize, True
    return (0, False) if one.first != other.first else None


def _single_word(difference: int, words: int) -> tuple[int, int] | None:
    """The word that alone has led to a difference of sums, and the difference of the words; None if none has."""
    inverse = _inverse_keys()
    for block in range(-(-words // BLOCK)):
        of_block = np.uint64(difference * pow(block_key(block), -1, 1 << 64) & _MASK)
        changes = (inverse[: words - block * BLOCK] * of_block).view(np.int64)
        fits = np.flatnonzero((changes > -(1 << 32)) & (changes < 1 << 32))
        if len(fits):
            return block * BLOCK + int(fits[0]), int(changes[fits[0]])
    return None


@functools.cache
def _inverse_keys() -> npt.NDArray[np.uint64]:
    """The inverses of the words' keys modulo 2**64, by Newton's method."""
    found: npt.NDArray[np.uint64] = WORD_KEYS.copy()  # right in the lowest three bits, as for any odd number
    for _ in range(5):
        found = found * (np.uint64(2) - WORD_KEYS * found)
    return found
