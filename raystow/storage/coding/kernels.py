"""The loops over bytes that numpy would take in a dozen passes, free of the GIL.

They are a library that was compiled ahead of time (``byte_loops.c``) for x86-64 with AVX2 and for aarch64. On other machines they
take several passes of numpy (``numpy_loops``). On the GPU their place is taken by Triton kernels of the same contract.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Concatenate, ParamSpec

import numpy as np

from . import numpy_loops
from .words import WORDS, Bytes, Words, exchanged

__all__ = [
    "WORDS",
    "Bytes",
    "Words",
    "add",
    "copy",
    "exchanged",
    "join",
    "pack7",
    "split",
    "subtract",
    "unpack7",
    "weighted_sum_triples",
    "weighted_sums",
]

_P = ParamSpec("_P")

SOURCE = Path(__file__).with_name("byte_loops.c")
LIBRARIES = {machine: SOURCE.with_suffix(f".{machine}.so") for machine in ("x86_64", "aarch64")}
"""By the name of the machine, as ``platform.machine`` gives it."""

STREAMED = 256 << 10
"""Bytes from which ``copy`` passes the caches."""

_NEEDED = {"x86_64": {"avx2", "bmi1", "bmi2", "fma", "movbe", "f16c", "abm"}}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loops that were compiled ahead of time; None if this machine cannot run them. Calls do not hold the GIL."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in LIBRARIES:
        return None
    try:
        if machine in _NEEDED:
            features = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
            if not _NEEDED[machine] <= set(features):
                return None
        found = ctypes.CDLL(str(LIBRARIES[machine]))
    except (OSError, StopIteration):
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for bits in (8, 16, 32, 64):
        getattr(found, f"add{bits}").argtypes = [pointer, pointer, size]
        getattr(found, f"subtract{bits}").argtypes = [pointer, pointer, pointer, size]
    for bits in (16, 32, 64):
        getattr(found, f"join{bits}").argtypes = [pointer, size, ctypes.c_int, pointer]
        getattr(found, f"split{bits}").argtypes = [pointer, size, ctypes.c_int, pointer]
    found.copy_streaming.argtypes = [pointer, size, pointer]
    found.pack7.argtypes = found.unpack7.argtypes = [pointer, pointer, size]
    found.weighted_sums.argtypes = [pointer, size, pointer, size, pointer]
    found.weighted_sum_triples.argtypes = [pointer, size, pointer, size, pointer, size]
    found.zstd_encode.argtypes = [pointer, pointer, pointer, size, size, pointer, size, pointer]
    found.zstd_decode.argtypes = [pointer, pointer, pointer, pointer, size, size, pointer, size]
    found.zstd_encode.restype = found.zstd_decode.restype = size
    return found


def address(array: Words) -> int:
    """Where a contiguous array lies, for the library."""
    if not array.flags.c_contiguous:
        raise ValueError("the array is not contiguous")
    return array.ctypes.data


def _or_loops(run: Callable[Concatenate[ctypes.CDLL, _P], None]) -> Callable[_P, None]:
    """Call ``run`` with the library; without one, the function of the same name in ``numpy_loops``."""

    @functools.wraps(run)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> None:
        found = library()
        if found is None:
            getattr(numpy_loops, run.__name__)(*args, **kwargs)
        else:
            run(found, *args, **kwargs)

    return call


def _same(what: str, sizes: Iterable[int], size: int) -> None:
    if any(other != size for other in sizes):
        raise ValueError(f"{what} of different sizes")


@_or_loops
def copy(found: ctypes.CDLL, words: Words, out: Bytes) -> None:
    """The bytes of an array, in C order, into ``out``. Many bytes pass the caches: that takes less time, and what the
    training has in the caches stays there."""
    _same("words and copy", (out.size,), words.nbytes)
    if words.nbytes < STREAMED or not words.flags.c_contiguous:
        numpy_loops.copy(words, out)
    else:
        found.copy_streaming(address(words), words.nbytes, address(out))


@_or_loops
def split(found: ctypes.CDLL, words: Words, rotate: bool, planes: tuple[Bytes, ...]) -> None:
    """Byte ``p`` of every word into ``planes[p]``; each word rotated left by one bit before if ``rotate``."""
    _same("planes and words", (plane.size for plane in planes), words.size)
    targets = (ctypes.c_void_p * len(planes))(*map(address, planes))
    getattr(found, f"split{8 * len(planes)}")(address(words), words.size, rotate, targets)


@_or_loops
def join(found: ctypes.CDLL, planes: tuple[Bytes, ...], rotated: bool, words: Words) -> None:
    """The inverse of ``split``."""
    _same("planes and words", (plane.size for plane in planes), words.size)
    sources = (ctypes.c_void_p * len(planes))(*map(address, planes))
    getattr(found, f"join{8 * len(planes)}")(sources, words.size, rotated, address(words))


@_or_loops
def subtract(found: ctypes.CDLL, words: Words, base: Words, out: Words) -> None:
    """``words - base`` modulo the words' range into ``out``, small differences of either sign as small numbers: 0, -1, 1, -2, 2
    become 0, 1, 2, 3, 4."""
    _same("words, base and differences", (base.size, out.size), words.size)
    getattr(found, f"subtract{8 * words.itemsize}")(address(words), address(base), address(out), words.size)


@_or_loops
def add(found: ctypes.CDLL, words: Words, base: Words) -> None:
    """The inverse of ``subtract``, in place."""
    _same("words and base", (base.size,), words.size)
    getattr(found, f"add{8 * words.itemsize}")(address(words), address(base), words.size)


@_or_loops
def pack7(found: ctypes.CDLL, plane: Bytes, out: Bytes) -> None:
    """The upper 7 bits of each byte, densely, most significant bit first; ``plane.size`` is a multiple of 8."""
    groups = plane.size // 8
    if out.size < 7 * groups:
        raise ValueError("the memory for a packed plane is too short")
    found.pack7(address(plane), address(out), groups)


@_or_loops
def unpack7(found: ctypes.CDLL, packed: Bytes, plane: Bytes) -> None:
    """The inverse of ``pack7``; the lowest bit of each byte becomes zero."""
    groups = plane.size // 8
    if packed.size < 7 * groups:
        raise ValueError("a packed plane is too short")
    found.unpack7(address(packed), address(plane), groups)


@_or_loops
def weighted_sum_triples(found: ctypes.CDLL, words: Words, keys: Words, sums: Words) -> None:
    """As ``weighted_sums``, three times in one pass: with each row of ``keys`` into the same row of ``sums`` (both contiguous
    uint64 [3, ...]). The third sum is of ``exchanged`` words.
    """
    _check_sums(words, keys[0], sums[0])
    if len(keys) != 3 or len(sums) != 3:
        raise ValueError("three rows of keys and of sums are needed")
    found.weighted_sum_triples(address(words), words.size, address(keys), keys.shape[1], address(sums), sums.shape[1])


@_or_loops
def weighted_sums(found: ctypes.CDLL, words: Words, keys: Words, sums: Words) -> None:
    """``sums[b]`` = sum of ``words[b * len(keys) + i] * keys[i]`` modulo 2**64. Words are uint32, the others uint64."""
    _check_sums(words, keys, sums)
    found.weighted_sums(address(words), words.size, address(keys), keys.size, address(sums))


def _check_sums(words: Words, keys: Words, sums: Words) -> None:
    _same("sums and blocks of words", (sums.size,), max(1, -(-words.size // keys.size)))
    if words.dtype != np.uint32 or keys.dtype != np.uint64 or sums.dtype != np.uint64:
        raise ValueError("words of another type")
