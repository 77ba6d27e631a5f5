"""Deltas: chunks as differences to the same chunks of an earlier version, where that pays.

Words are subtracted as integers, floats too: from one step to the next most of them keep sign, exponent and the upper bits of the
mantissa, so that the difference is a small number and its upper planes are nearly empty. See docs/design/015-deltas.md.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from msgspec import structs

from . import kernels
from .chunk import ChunkEncoder, Coding, expected, sample
from .dtypes import DType
from .kernels import Bytes

LEAST = 32 << 10
"""Bytes; a delta of a smaller chunk is not worth the second read that it costs a restore."""

GAIN = 0.95
"""The largest part of the chunk's own bytes: a delta must be worth its second read."""


def encode(encoder: ChunkEncoder, raw: Bytes, dtype: DType, base: Bytes, version: int) -> tuple[Bytes, Coding] | None:
    """As ``ChunkEncoder.encode``, of the difference of ``raw`` to ``base``, the bytes of the same chunk in ``version``, which are
    overwritten. None if the chunk by itself is as small."""
    if raw.size < LEAST:
        return None
    word = kernels.WORDS[dtype.width]
    words, others = raw.view(word), base.view(word)
    some = sample(words)
    differences = np.empty_like(some)
    kernels.subtract(some, sample(others), differences)
    if expected(differences, False) > GAIN * expected(some, dtype.rotate):
        return None
    kernels.subtract(words, others, others)
    stored, coding = encoder.encode(base, replace(dtype, rotate=False))
    return stored, structs.replace(coding, base=version)
