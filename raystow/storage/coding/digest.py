"""The two digests of a chunk.

*Of the raw bytes*: ``raw_digest``, 64 bits, a sum of products that a GPU computes at memory speed in any order. It
proves that the coded bytes are those that were read, and the decoded ones those that were coded. It is no protection from an
attacker.

*Of the raw bytes, to find unchanged chunks*: ``digest_pair``, ``raw_digest`` and a second one with other keys, 128 bits. It
is never stored.

*Of the stored bytes*: BLAKE3, 256 bits, checked before any decoder sees them. Records hold the digests of fragments, and the
root those of records, so a digest of the root covers everything.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from . import kernels
from .kernels import Bytes

BLOCK = 16384
"""32-bit words in a block of ``raw_digest``."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UNMIX = pow(_MIX[0], -1, 1 << 64), pow(_MIX[1], -1, 1 << 64)


def _mix(x: Any) -> Any:
    """The finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = ((x ^ (x >> 30)) * _MIX[0]) & _MASK
    x = ((x ^ (x >> 27)) * _MIX[1]) & _MASK
    return x ^ (x >> 31)


def _word_keys(first: int) -> npt.NDArray[np.uint64]:
    """The multipliers of a block's words: odd, so that a change in a single word always changes the sum."""
    mixed: npt.NDArray[np.uint64] = _mix(np.arange(first + 1, first + 1 + BLOCK, dtype=np.uint64) * np.uint64(_GOLDEN))
    mixed |= np.uint64(1)
    return mixed


WORD_KEYS = _word_keys(0)
"""The multipliers of the words in a block."""

SECOND_WORD_KEYS = _word_keys(1 << 40)
"""The same for the second digest of ``digest_pair``."""

_PAIR = np.stack([WORD_KEYS, SECOND_WORD_KEYS])


@functools.lru_cache(maxsize=65536)
def block_key(block: int, *, second: bool = False) -> int:
    """The multiplier of a block's sum, which is odd, too."""
    return int(_mix((((1 << 41 if second else 1 << 32) + block + 1) * _GOLDEN) & _MASK)) | 1


def finish(total: Any, nbytes: Any) -> Any:
    """The digest of ``nbytes`` bytes whose weighted words add up to ``total`` modulo 2**64; or several, as arrays of uint64."""
    return _mix((total & _MASK) ^ ((nbytes * _GOLDEN) & _MASK))


def unfinished(digest: Any, nbytes: Any) -> Any:
    """The total that ``finish`` has made a digest of; or several, as arrays of uint64."""
    x = digest ^ (digest >> 31) ^ (digest >> 62)
    x = (x * _UNMIX[1]) & _MASK
    x = x ^ (x >> 27) ^ (x >> 54)
    x = (x * _UNMIX[0]) & _MASK
    return x ^ (x >> 30) ^ (x >> 60) ^ ((nbytes * _GOLDEN) & _MASK)


def raw_digest(raw: Bytes) -> int:
    """A 64-bit digest of a contiguous uint8 array, by multilinear hashing (Carter, Wegman 1979).

    The bytes are read as little-endian 32-bit words ``w``, the last one padded with zeros. With ``key(i)`` the odd splitmix64
    sequence, block ``b`` of 16,384 words sums to ``s[b] = sum(w[b, i] * key(i))``, and the digest is
    ``mix(sum(s[b] * key(2**32 + b)) ^ (len(raw) * 0x9E3779B97F4A7C15))``, all modulo 2**64.
    """
    words = _words(raw)
    sums = np.empty(max(1, -(-words.size // BLOCK)), np.uint64)
    kernels.weighted_sums(words, WORD_KEYS, sums)
    return _digest(raw, sums, WORD_KEYS, second=False)


def digest_pair(raw: Bytes) -> tuple[int, int]:
    """``raw_digest``, and a second one of ``kernels.mixed`` words, with keys from 2**40 (words) and 2**41 on (blocks).

    Chunks of one size and with equal pairs are taken for equal. A sum of products forgets the upper bits of the keys where words
    differ in their upper bits only, as float32 numbers do whose signs have changed; mixed words differ in any bits.
    """
    words = _words(raw)
    sums = np.empty((2, max(1, -(-words.size // BLOCK))), np.uint64)
    kernels.weighted_sum_pairs(words, _PAIR, sums)
    return _digest(raw, sums[0], WORD_KEYS, second=False), _digest(raw, sums[1], SECOND_WORD_KEYS, second=True)


def _words(raw: Bytes) -> kernels.Words:
    """The whole 32-bit words of some bytes."""
    whole = raw.size & ~3
    return raw[:whole].view(np.uint32) if raw.ctypes.data % 4 == 0 else raw[:whole].copy().view(np.uint32)


def _digest(raw: Bytes, sums: kernels.Words, keys: kernels.Words, *, second: bool) -> int:
    """The digest of bytes whose blocks have these sums, but for a last word that is not whole."""
    total, (whole, rest) = sum(int(s) * block_key(b, second=second) for b, s in enumerate(sums)), divmod(raw.size, 4)
    if rest:  # the padded last word, in whichever block it falls
        last, (block, place) = int.from_bytes(raw[4 * whole :].tobytes(), "little"), divmod(whole, BLOCK)
        last = kernels.mixed(last) if second else last
        total += last * int(keys[place]) * block_key(block, second=second)
    return int(finish(total, raw.size))


def stored_digest(*parts: Any) -> bytes:
    """BLAKE3, 32 bytes, over the concatenation of ``parts`` (bytes-like)."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest()
