"""Rounds numbers to the nearest ones with fewer bits of mantissa: for the weights of old versions, if a retention policy says so.

The nearest number has the smallest error, and is right where no narrower tensor is derived from the result any more. States that
are saved to train on are rounded in another way, by ``lossy=``.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ..errors import Damaged
from . import dtypes, kernels
from .kernels import Bytes, Words
from .rounded import Rounded, together

_AT_ONCE = 1 << 16  # numbers: float64 copies of these stay in a core's cache


def round_to_nearest(raw: Bytes, dtype: str, bits: int) -> Rounded:
    """Round the numbers in ``raw`` (contiguous uint8, some at least, of a dtype with more than ``bits`` bits of mantissa) where
    they lie; of two that are equally near, to the one whose last bit is zero.

    The error is at most 2^-(bits + 1) of the number (of the smallest normal one, for those below it, which may become zero). What
    would become infinite is cut instead, with an error of less than twice that. Infinities and NaNs stay as they are. ``Damaged``
    if any number is not within that afterwards.
    """
    words, numbers = raw.view(kernels.WORDS[dtypes.dtype(dtype).width]), raw.view(dtypes.to_numpy(dtype))
    pieces = [slice(start, start + _AT_ONCE) for start in range(0, words.size, _AT_ONCE)]
    with np.errstate(over="ignore", invalid="ignore"):  # of NaNs, and squares of large numbers
        return together(_round(words[piece], numbers[piece], dtype, bits) for piece in pieces)


def _round(words: Words, numbers: Words, dtype: str, bits: int) -> Rounded:
    """``words`` and ``numbers``: the same memory."""
    mantissa, tiny = dtypes.MANTISSA[dtype], float(ml_dtypes.finfo(numbers.dtype).smallest_normal)
    unit = 1 << (mantissa - bits)
    had, before = words.copy(), numbers.astype(np.float64)
    finite = np.isfinite(before)
    words += (had // unit & 1) + (unit // 2 - 1)  # carries into the exponent where that is the nearest
    words -= words % unit
    over = finite & ~np.isfinite(numbers)
    np.copyto(words, had - had % unit, where=over)
    np.copyto(words, had, where=~finite)
    size = np.abs(np.where(finite, before, 0.0))
    error = np.abs(np.where(finite, before - numbers.astype(np.float64), 0.0))
    relative = error / np.maximum(size, tiny)
    if not (relative <= np.where(over, 2.0, 1.0) * 2.0 ** -(bits + 1)).all():
        raise Damaged(f"{dtype} numbers have changed by more than rounding to {bits} bits of mantissa may")
    lowest = words[words != had] & ((1 << mantissa) - 1) | (1 << mantissa)
    zeros = np.frexp((lowest & (~lowest + 1)).astype(np.float64))[1] - 1
    return Rounded(
        f"NearestBits({bits})",
        float(error.max()),
        float(relative.max()),
        float(np.square(size).sum()),
        float(np.square(error).sum()),
        int(zeros.sum()) // 8,
    )
