"""The loops over bytes for machines without compiled ones: several passes of numpy each, and Python for the frames of a plane."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from zstandard import backend_cffi

from .words import Bytes, Words, exchanged

_ffi: Any = backend_cffi.ffi
_lib: Any = backend_cffi.lib

_SLAB = 1 << 14
_SEVENS = np.arange(49, -1, -7, dtype=np.uint64)
"""By how many bits each 7 of 56 are shifted."""


def _slabs(count: int) -> Iterator[slice]:
    """Parts of ``count`` items, whose temporary arrays stay in the processor's cache."""
    return (slice(start, min(start + _SLAB, count)) for start in range(0, count, _SLAB))


def copy(words: Words, out: Bytes) -> None:
    """The bytes of an array, in C order, into ``out``."""
    np.copyto(out.view(words.dtype).reshape(words.shape), words)


def split(words: Words, rotate: bool, planes: tuple[Bytes, ...]) -> None:
    """Byte ``p`` of every word into ``planes[p]``; each word rotated left by one bit before if ``rotate``."""
    one, top = _shifts(words)
    for slab in _slabs(words.size):
        some = (words[slab] << one) | (words[slab] >> top) if rotate else np.ascontiguousarray(words[slab])
        for p, part in enumerate(some.view(np.uint8).reshape(-1, words.itemsize).T):
            planes[p][slab] = part


def join(planes: tuple[Bytes, ...], rotated: bool, words: Words) -> None:
    """The inverse of ``split``."""
    parts, (one, top) = words.view(np.uint8).reshape(-1, words.itemsize), _shifts(words)
    for slab in _slabs(words.size):
        for p, plane in enumerate(planes):
            parts[slab, p] = plane[slab]
        if rotated:
            words[slab] = (words[slab] >> one) | (words[slab] << top)


def subtract(words: Words, base: Words, out: Words) -> None:
    """``words - base`` modulo the words' range into ``out``, small differences of either sign as small numbers."""
    one, top = _shifts(words)
    for slab in _slabs(words.size):
        difference = words[slab] - base[slab]
        out[slab] = (difference << one) ^ np.negative(difference >> top)


def add(words: Words, base: Words) -> None:
    """The inverse of ``subtract``, in place."""
    one, _ = _shifts(words)
    for slab in _slabs(words.size):
        words[slab] = base[slab] + ((words[slab] >> one) ^ np.negative(words[slab] & one))


def pack7(plane: Bytes, out: Bytes) -> None:
    """The upper 7 bits of each byte, densely, most significant bit first; ``plane.size`` is a multiple of 8."""
    groups, packed = plane.reshape(-1, 8), out[: plane.size // 8 * 7].reshape(-1, 7)
    for slab in _slabs(len(groups)):
        bits = np.unpackbits(groups[slab]).reshape(-1, 8)[:, :7]
        packed[slab] = np.packbits(bits).reshape(-1, 7)


def unpack7(packed: Bytes, plane: Bytes) -> None:
    """The inverse of ``pack7``; the lowest bit of each byte becomes zero."""
    groups = plane.size // 8
    coded, parts = packed[: 7 * groups].reshape(groups, 7), plane[: 8 * groups].reshape(groups, 8)
    for slab in _slabs(groups):
        whole = np.zeros((len(coded[slab]), 8), np.uint8)
        whole[:, 1:] = coded[slab]
        bits = whole.view(">u8").astype(np.uint64)
        parts[slab] = ((bits >> _SEVENS) & np.uint64(127)) << np.uint64(1)


def weighted_sum_triples(words: Words, keys: Words, sums: Words) -> None:
    """As ``weighted_sums``, with each row of ``keys`` into the same row of ``sums``; the third sum is of ``exchanged`` words."""
    for b in range(sums.shape[1]):
        block = words[b * keys.shape[1] : (b + 1) * keys.shape[1]].astype(np.uint64)
        for row, some in enumerate((block, block, exchanged(block))):
            sums[row, b] = np.dot(some, keys[row, : block.size])


def weighted_sums(words: Words, keys: Words, sums: Words) -> None:
    """``sums[b]`` = sum of ``words[b * len(keys) + i] * keys[i]`` modulo 2**64."""
    for b in range(sums.size):
        block = words[b * keys.size : (b + 1) * keys.size]
        sums[b] = np.dot(block.astype(np.uint64), keys[: block.size])


def zstd_encode(context: int, plane: Bytes, stream: int, out: Bytes, sizes: Words) -> int:
    """Fill ``sizes``; return 0 or an error code."""
    end = 0
    for i in range(sizes.size):
        source = plane[i * stream : (i + 1) * stream]
        size = _lib.ZSTD_compress2(
            _ffi.cast("ZSTD_CCtx*", context),
            *(_ffi.cast("void*", out.ctypes.data + end), out.size - end),
            *(_ffi.cast("void*", source.ctypes.data), source.size),
        )
        if _lib.ZSTD_isError(size):
            return int(size)
        sizes[i] = size
        end += size
    return 0


def zstd_decode(context: int, coded: Bytes, sizes: Words, stream: int, plane: Bytes) -> int:
    """Return the number of bytes decoded until all were or one frame had the wrong size, or an error code."""
    end = 0
    for i in range(sizes.size):
        target, size = plane[i * stream : (i + 1) * stream], int(sizes[i])
        got = _lib.ZSTD_decompressDCtx(
            _ffi.cast("ZSTD_DCtx*", context),
            *(_ffi.cast("void*", target.ctypes.data), target.size),
            *(_ffi.cast("void*", coded.ctypes.data + end), size),
        )
        if got != target.size:
            return int(got) if _lib.ZSTD_isError(got) else i * stream
        end += size
    return plane.size


def _shifts(words: Words) -> tuple[Any, Any]:
    """1, and the number of a word's highest bit, as words."""
    word = words.dtype.type
    return word(1), word(8 * words.itemsize - 1)
