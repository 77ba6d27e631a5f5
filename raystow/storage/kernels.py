"""The loops over bytes that numpy would take in a dozen passes: compiled once by numba, cached on disk, free of the GIL.

Each has a numpy equivalent of a few lines in ``docs/spec/format-v1.md``, against which the tests hold it. On the GPU their
place is taken by Triton kernels of the same contract.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]
_F = TypeVar("_F", bound=Callable[..., Any])
compiled: Callable[[_F], _F] = numba.njit(cache=True, nogil=True)

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Element width in bytes -> the unsigned word type that the kernels see."""

_BLOCK = 4096  # words that stay in the first-level cache between the steps


def _plane_loops(word: Any) -> tuple[Any, Any]:
    """``split`` and ``join`` for one word type; kept to that type throughout, so that the loops become vector instructions."""
    one, top, byte = word(1), word(8 * word().itemsize - 1), word(8)

    @compiled
    def split(words: Words, rotate: bool, planes: tuple[Bytes, ...]) -> None:
        block = np.empty(_BLOCK, words.dtype)
        for start in range(0, words.size, _BLOCK):
            source = words[start : start + _BLOCK]
            t = block[: source.size]
            for i in range(t.size):
                t[i] = word(word(source[i] << one) | word(source[i] >> top)) if rotate else source[i]
            for p in range(len(planes)):
                plane, shift = planes[p][start : start + _BLOCK], word(8 * p)
                for i in range(t.size):
                    plane[i] = np.uint8(word(t[i] >> shift))

    @compiled
    def join(planes: tuple[Bytes, ...], rotated: bool, words: Words) -> None:
        block, last = np.empty(_BLOCK, words.dtype), len(planes) - 1
        for start in range(0, words.size, _BLOCK):
            target = words[start : start + _BLOCK]
            t = block[: target.size]
            plane = planes[last][start : start + _BLOCK]
            for i in range(t.size):
                t[i] = word(plane[i])
            for p in range(last - 1, -1, -1):
                plane = planes[p][start : start + _BLOCK]
                for i in range(t.size):
                    t[i] = word(word(t[i] << byte) | word(plane[i]))
            for i in range(t.size):
                target[i] = word(word(t[i] >> one) | word(t[i] << top)) if rotated else t[i]

    return split, join


_LOOPS = {width: _plane_loops(word) for width, word in WORDS.items() if width > 1}


def split(words: Words, rotate: bool, planes: tuple[Bytes, ...]) -> None:
    """Byte ``p`` of every word into ``planes[p]``; each word rotated left by one bit before if ``rotate``."""
    _LOOPS[words.itemsize][0](words, rotate, planes)


def join(planes: tuple[Bytes, ...], rotated: bool, words: Words) -> None:
    """The inverse of ``split``."""
    readable = []
    for plane in planes:  # read-only views all: one type for the compiled loop, whatever memory the planes lie in
        view = plane.view()
        view.flags.writeable = False
        readable.append(view)
    _LOOPS[words.itemsize][1](tuple(readable), rotated, words)


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
def weighted_sums(words: Words, keys: Words, sums: Words) -> None:
    """``sums[b]`` = sum of ``words[b * len(keys) + i] * keys[i]`` modulo 2**64."""
    for b in range(sums.size):
        block = words[b * keys.size : (b + 1) * keys.size]
        total = np.uint64(0)
        for i in range(block.size):
            total += np.uint64(block[i]) * keys[i]
        sums[b] = total
