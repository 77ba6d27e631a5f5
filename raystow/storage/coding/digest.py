"""The two digests of a chunk.

*Of the raw bytes*: ``raw_digest``, 64 bits, a sum of products that a GPU computes at memory speed in any order. It
proves that the coded bytes are those that were read, and the decoded ones those that were coded. Its keys are public, so it
is no protection from an attacker, who finds two tensors with equal digests in less than a second. It never decides whether
two chunks are equal.

*Of the raw bytes, to find equal chunks*: the second number of ``digest_pair``, 128 bits, with secret keys. It is never stored
or shown, and leaves the node in no message.

*Of the stored bytes*: BLAKE3, 256 bits, checked before any decoder sees them. Records hold the digests of fragments, and the
root those of records, so a digest of the root covers everything.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ..limits import MAX_CHUNK
from ..runtime.clock import SYSTEM
from . import kernels
from .kernels import Bytes

BLOCK = 16384
"""32-bit words in a block of ``raw_digest``."""

SECRET = 32
"""Bytes that ``SecretKeys`` are expanded from."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UNMIX = pow(_MIX[0], -1, 1 << 64), pow(_MIX[1], -1, 1 << 64)


def _mix(x: Any) -> Any:
    """The finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = ((x ^ (x >> 30)) * _MIX[0]) & _MASK
    x = ((x ^ (x >> 27)) * _MIX[1]) & _MASK
    return x ^ (x >> 31)


def word_keys(first: int) -> npt.NDArray[np.uint64]:
    """The multipliers of a block's words: odd, so that a change in a single word always changes the sum."""
    mixed: npt.NDArray[np.uint64] = _mix(np.arange(first + 1, first + 1 + BLOCK, dtype=np.uint64) * np.uint64(_GOLDEN))
    mixed |= np.uint64(1)
    return mixed


WORD_KEYS = word_keys(0)
"""The multipliers of the words in a block."""


@functools.lru_cache(maxsize=65536)
def block_key(block: int) -> int:
    """The multiplier of a block's sum, which is odd, too."""
    return int(_mix((((1 << 32) + block + 1) * _GOLDEN) & _MASK)) | 1


class SecretKeys:
    """The keys of two more sums of products, which are secret. Its ``repr`` does not show them.

    Args:
        secret: ``SECRET`` random bytes. BLAKE3 expands them to all keys.

    Attributes:
        words: The odd multipliers of the words in a block: uint64 [2, BLOCK].
        blocks: Those of the blocks' sums, which are odd, too: uint64 [2, 4096].
    """

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self.words = self._expanded(b"words", BLOCK)
        self.blocks = self._expanded(b"blocks", MAX_CHUNK // (4 * BLOCK))
        self.all_words = np.concatenate([WORD_KEYS[np.newaxis], self.words])

    def _expanded(self, purpose: bytes, count: int) -> npt.NDArray[np.uint64]:
        data = blake3(purpose, key=self.secret).digest(16 * count)
        keys: npt.NDArray[np.uint64] = np.frombuffer(data, "<u8").reshape(2, count).astype(np.uint64)
        keys |= np.uint64(1)
        return keys


@functools.cache
def process_keys() -> SecretKeys:
    """The keys of this process, drawn at random at the first call. Others have them only if this process sends its secret."""
    return SecretKeys(bytes.fromhex("".join(SYSTEM.token() for _ in range(SECRET // 8))))


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
    total = sum(int(s) * block_key(b) for b, s in enumerate(sums))
    if raw.size % 4:
        block, place = divmod(words.size, BLOCK)
        total += _last(raw) * int(WORD_KEYS[place]) * block_key(block)
    return int(finish(total, raw.size))


def digest_pair(raw: Bytes, keys: SecretKeys) -> tuple[int, int]:
    """``raw_digest``, and a second number of 128 bits with secret keys. Chunks of one size with equal pairs are taken for equal.

    The second number consists of two sums like that of ``raw_digest``, each with its own keys: the lower 64 bits are of the
    words, the upper ones of the words with their halves exchanged.

    An attacker who chooses two different chunks of one size without knowing the keys makes their second numbers equal with a
    probability of at most 2**-69. Let ``d[b, i]`` be the differences of the words.

    - One sum is ``sum(word_key[i] * e[i])`` with ``e[i] = sum(block_key[b] * d[b, i])``. Take a ``d[b, i]`` that 2**(v+1) does
      not divide. Over the odd keys of its block, 2**u divides ``e[i]`` with a probability of at most 2**(v+1-u). Over the odd
      keys of its word, the sum is 0 then with at most 2**(u-63). For all u from v + 1 to 64, this is at most (64-v) * 2**(v-63).
    - The v of the two sums add up to 46 at most, 31 + 15: a difference in the highest bit of a word is one in bit 15 of the other
      form. The keys of the sums are independent, so both are 0 with at most 33 * 49 * 2**(46-126).

    This suffices, since nobody can search for such chunks: an attempt is a chunk of a save, and a failed one teaches nothing.
    2**40 attempts succeed with 2**-29.
    """
    words = _words(raw)
    sums = np.empty((3, max(1, -(-words.size // BLOCK))), np.uint64)
    kernels.weighted_sum_triples(words, keys.all_words, sums)
    public = sum(int(s) * block_key(b) for b, s in enumerate(sums[0]))
    secret = [int(total) for total in (sums[1:] * keys.blocks[:, : sums.shape[1]]).sum(axis=1, dtype=np.uint64)]
    if raw.size % 4:
        block, place = divmod(words.size, BLOCK)
        last = _last(raw)
        public += last * int(WORD_KEYS[place]) * block_key(block)
        for row, word in enumerate((last, kernels.exchanged(last))):
            secret[row] += word * int(keys.words[row, place]) * int(keys.blocks[row, block])
    low, high = (int(finish(total, raw.size)) for total in secret)
    return int(finish(public, raw.size)), low | high << 64


def _words(raw: Bytes) -> kernels.Words:
    """The whole 32-bit words of some bytes."""
    whole = raw.size & ~3
    return raw[:whole].view(np.uint32) if raw.ctypes.data % 4 == 0 else raw[:whole].copy().view(np.uint32)


def _last(raw: Bytes) -> int:
    """The last word, which is not whole, padded with zeros."""
    return int.from_bytes(raw[raw.size & ~3 :].tobytes(), "little")


def stored_digest(*parts: Any) -> bytes:
    """BLAKE3, 32 bytes, over the concatenation of ``parts`` (bytes-like)."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest()
