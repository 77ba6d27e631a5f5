"""The loops over bytes that numpy would take in a dozen passes, and those over the frames of a plane: compiled once by numba,
cached on disk, free of the GIL.

``kernels`` calls them, and imports this module when the first one is needed: that takes a third of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import binding  # type: ignore[import-untyped]
from numba import types
from zstandard import backend_cffi

from .words import WORDS, Bytes, Words

_F = TypeVar("_F", bound=Callable[..., Any])
compiled: Callable[[_F], _F] = numba.njit(cache=True, nogil=True)


def _plane_loops(word: Any) -> tuple[Any, Any]:
    """``split`` and ``join`` for one word type; kept to that type throughout, so that the loops become vector instructions.

    The number of planes is a constant of the compiled code, so the inner loops unroll: one pass over the memory, at its speed.
    """
    width = word().itemsize
    one, top = word(1), word(8 * width - 1)

    @compiled
    def split(words: Words, rotate: bool, planes: tuple[Bytes, ...]) -> None:
        for i in range(words.size):
            t = word(word(words[i] << one) | word(words[i] >> top)) if rotate else words[i]
            for p in range(width):
                planes[p][i] = np.uint8(word(t >> word(8 * p)))

    @compiled
    def join(planes: tuple[Bytes, ...], rotated: bool, words: Words) -> None:
        for i in range(words.size):
            t = word(0)
            for p in range(width):
                t = word(t | word(word(planes[p][i]) << word(8 * p)))
            words[i] = word(word(t >> one) | word(t << top)) if rotated else t

    return split, join


_LOOPS = {width: _plane_loops(word) for width, word in WORDS.items() if width > 1}


def split(words: Words, rotate: bool, planes: tuple[Bytes, ...]) -> None:
    """Byte ``p`` of every word into ``planes[p]``; each word rotated left by one bit before if ``rotate``."""
    _LOOPS[words.itemsize][0](words, rotate, planes)


def join(planes: tuple[Bytes, ...], rotated: bool, words: Words) -> None:
    """The inverse of ``split``."""
    _LOOPS[words.itemsize][1](tuple(map(_readable, planes)), rotated, words)


def _delta_loops(word: Any) -> tuple[Any, Any]:
    """``subtract`` and ``add`` for one word type."""
    one, top = word(1), word(8 * word().itemsize - 1)

    @compiled
    def subtract(words: Words, base: Words, out: Words) -> None:
        for i in range(words.size):
            difference = word(words[i] - base[i])
            sign = word(word(0) - word(difference >> top))
            out[i] = word(word(difference << one) ^ sign)

    @compiled
    def add(words: Words, base: Words) -> None:
        for i in range(words.size):
            sign = word(word(0) - word(words[i] & one))
            words[i] = word(base[i] + word(word(words[i] >> one) ^ sign))

    return subtract, add


_DELTAS = {width: _delta_loops(word) for width, word in WORDS.items()}


def subtract(words: Words, base: Words, out: Words) -> None:
    """``words - base`` modulo the words' range into ``out``, small differences of either sign as small numbers: 0, -1, 1, -2, 2
    become 0, 1, 2, 3, 4."""
    _DELTAS[words.itemsize][0](_readable(words), _readable(base), out)


def add(words: Words, base: Words) -> None:
    """The inverse of ``subtract``, in place."""
    _DELTAS[words.itemsize][1](words, _readable(base))


def _readable(array: Words) -> Words:
    """A read-only view: one type for the compiled loop, whatever memory it lies in."""
    view: Words = array.view()
    view.flags.writeable = False
    return view


@compiled
def pack7(plane: Bytes, out: Bytes) -> None:
    """The upper 7 bits of each byte, densely, most significant bit first; ``plane.size`` is a multiple of 8."""
    for j in range(plane.size // 8):
        x = np.uint64(0)
        for t in range(8):
            x = (x << np.uint64(7)) | np.uint64(plane[8 * j + t] >> 1)
        for t in range(7):
            out[7 * j + t] = (x >> np.uint64(48 - 8 * t)) & np.uint64(255)


@compiled
def unpack7(packed: Bytes, plane: Bytes) -> None:
    """The inverse of ``pack7``; the lowest bit of each byte becomes zero."""
    for j in range(plane.size // 8):
        x = np.uint64(0)
        for t in range(7):
            x = (x << np.uint64(8)) | np.uint64(packed[7 * j + t])
        for t in range(8):
            plane[8 * j + t] = ((x >> np.uint64(49 - 7 * t)) & np.uint64(127)) << np.uint64(1)


@compiled
def weighted_sum_triples(words: Words, keys: Words, sums: Words) -> None:
    """As ``weighted_sums``, three times in one pass: with each row of ``keys`` into the same row of ``sums`` (uint64 [3, n]).

    The third sum is of words with their halves exchanged.
    """
    for b in range(sums.shape[1]):
        block = words[b * keys.shape[1] : (b + 1) * keys.shape[1]]
        first = second = third = np.uint64(0)
        for i in range(block.size):
            word = np.uint64(block[i])
            first += word * keys[0, i]
            second += word * keys[1, i]
            third += ((word >> np.uint64(16)) | ((word & np.uint64(0xFFFF)) << np.uint64(16))) * keys[2, i]
        sums[0, b], sums[1, b], sums[2, b] = first, second, third


@compiled
def weighted_sums(words: Words, keys: Words, sums: Words) -> None:
    """``sums[b]`` = sum of ``words[b * len(keys) + i] * keys[i]`` modulo 2**64."""
    for b in range(sums.size):
        block = words[b * keys.size : (b + 1) * keys.size]
        total = np.uint64(0)
        for i in range(block.size):
            total += np.uint64(block[i]) * keys[i]
        sums[b] = total


def _external(name: str) -> Any:
    """A function of the library for compiled code to call by name, so that the code can be cached on disk. It takes (context,
    target, its size, source, its size), pointers as integers, and gives a size or an error code beyond all sizes."""
    symbol = f"raystow_{name}"
    address = backend_cffi.ffi.cast("uintptr_t", backend_cffi.ffi.addressof(backend_cffi.lib, name))
    binding.add_symbol(symbol, int(address))
    return types.ExternalFunction(symbol, types.uint64(*[types.uint64] * 5))


_compress, _decompress = _external("ZSTD_compress2"), _external("ZSTD_decompressDCtx")


@compiled
def zstd_encode(context: int, plane: Bytes, stream: int, out: Bytes, sizes: Words) -> Any:
    """Fills ``sizes``; 0 or an error code."""
    end = 0
    for i in range(sizes.size):
        source = plane[i * stream : (i + 1) * stream]
        size = _compress(context, out.ctypes.data + end, out.size - end, source.ctypes.data, source.size)
        if size > np.uint64(out.size):
            return size
        sizes[i] = size
        end += np.int64(size)
    return np.uint64(0)


@compiled
def zstd_decode(context: int, coded: Bytes, sizes: Words, stream: int, plane: Bytes) -> Any:
    """The number of bytes decoded until all were or one frame had the wrong size, or an error code."""
    end = 0
    for i in range(sizes.size):
        target, size = plane[i * stream : (i + 1) * stream], np.int64(sizes[i])
        got = _decompress(context, target.ctypes.data, target.size, coded.ctypes.data + end, size)
        if got != np.uint64(target.size):
            return got if got > np.uint64(plane.size) else np.uint64(i * stream)
        end += size
    return np.uint64(plane.size)
