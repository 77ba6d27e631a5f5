"""The two digests of a chunk.

*Of the raw bytes*: ``raw_digest``, 64 bits, a sum of products that a GPU computes at memory speed in any order. It tells that
what was coded is what was read, and that what was decoded is what was coded; it does not stand against an adversary.

*Of the stored bytes*: BLAKE3, 256 bits, checked before any decoder sees them. Records hold the digests of fragments, and the
root those of records, so a digest of the root covers everything.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from blake3 import blake3

from . import kernels
from .kernels import Bytes

BLOCK = 16384
"""32-bit words in a block of ``raw_digest``."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: Any) -> Any:
    """The finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@functools.lru_cache(maxsize=65536)
def _key(i: int) -> int:
    """The odd multiplier of word ``i``: odd, so that a change in a single word always changes the sum."""
    return int(_mix(((i + 1) * _GOLDEN) & _MASK)) | 1


WORD_KEYS = np.array([_key(i) for i in range(BLOCK)], dtype=np.uint64)
"""The multipliers of the words in a block."""


def block_key(block: int) -> int:
    """The multiplier of a block's sum."""
    return _key((1 << 32) + block)


def finish(total: Any, nbytes: Any) -> Any:
    """The digest of ``nbytes`` bytes whose weighted words add up to ``total`` modulo 2**64; or several, as arrays of uint64."""
    return _mix((total & _MASK) ^ ((nbytes * _GOLDEN) & _MASK))


def raw_digest(raw: Bytes) -> int:
    """A 64-bit digest of a contiguous uint8 array, by multilinear hashing (Carter, Wegman 1979).

    The bytes are read as little-endian 32-bit words ``w``, the last one padded with zeros. With ``key(i)`` the odd splitmix64
    sequence, block ``b`` of 16,384 words sums to ``s[b] = sum(w[b, i] * key(i))``, and the digest is
    ``mix(sum(s[b] * key(2**32 + b)) ^ (len(raw) * 0x9E3779B97F4A7C15))``, all modulo 2**64.
    """
    whole = raw.size & ~3
    words = raw[:whole].view(np.uint32) if raw.ctypes.data % 4 == 0 else raw[:whole].copy().view(np.uint32)
    sums = np.empty(max(1, -(-words.size // BLOCK)), np.uint64)
    kernels.weighted_sums(words, WORD_KEYS, sums)
    total = sum(int(s) * block_key(b) for b, s in enumerate(sums))
    if whole < raw.size:  # the padded last word, in whichever block it falls
        last, block = int.from_bytes(raw[whole:].tobytes(), "little"), words.size // BLOCK
        total += last * _key(words.size % BLOCK) * block_key(block)
    return int(finish(total, raw.size))


def stored_digest(*parts: Any) -> bytes:
    """BLAKE3, 32 bytes, over the concatenation of ``parts`` (bytes-like)."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest()
