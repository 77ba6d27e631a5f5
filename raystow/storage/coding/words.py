"""The arrays that loops over bytes take, and the second form of words that digests use."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]

_Word = TypeVar("_Word", int, Words)

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Element width in bytes -> the unsigned word type that the loops see."""


def exchanged(word: _Word) -> _Word:
    """A 32-bit word with its halves exchanged. Or several, as an array of uint64."""
    return (word >> 16 | word << 16) & 0xFFFFFFFF
