"""The arrays that loops over bytes take, and the mixing of words that digests use."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Element width in bytes -> the unsigned word type that the loops see."""


def mixed(word: Any) -> Any:
    """A 32-bit word as another one: the finalizer of MurmurHash3 (Appleby, 2011), a bijection after which every bit depends on
    all. Or several, as an array of uint64."""
    word = (word ^ word >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    word = (word ^ word >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return word ^ word >> 16
