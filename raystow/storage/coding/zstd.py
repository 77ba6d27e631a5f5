"""Zstandard as raystow uses it: standard frames (RFC 8878), coded either as literals only or with matches.

On exponent planes the best speed *and* ratio come from Huffman-coded literals without any search for matches. The library
does that only with a parameter that python-zstandard exposes through its CFFI interface and not through its classes,
so this module is the one place that speaks CFFI. All streams of a plane are coded within one compiled loop that holds no GIL:
taking the GIL back after every stream would make two threads slower than one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from zstandard import backend_cffi

from ..errors import Damaged
from . import kernels, numpy_loops
from .kernels import Bytes, Words

_ffi: Any = backend_cffi.ffi
_lib: Any = backend_cffi.lib


# ZSTD_cParameter numbers, from zstd.h.
_LEVEL, _WINDOW_LOG, _HASH_LOG, _MIN_MATCH, _TARGET_LENGTH, _STRATEGY, _LITERALS = 100, 101, 102, 105, 106, 107, 1002
_FAST, _ENABLE = 1, 1

LITERALS = {_LEVEL: -1, _WINDOW_LOG: 17, _TARGET_LENGTH: 131072, _LITERALS: _ENABLE}
"""Huffman-coded literals; steps of 128 KiB through the input leave no place to look for a match."""

MATCHES = {_LEVEL: 1, _WINDOW_LOG: 17, _HASH_LOG: 12, _MIN_MATCH: 7, _STRATEGY: _FAST, _LITERALS: _ENABLE}
"""The fast strategy with long matches only: what squared gradients and integer counters repeat is worth finding."""


class ZstdEncoder:
    """A compression context with fixed parameters. Not for several threads at once."""

    def __init__(self, parameters: dict[int, int]) -> None:
        self._context = _ffi.gc(_lib.ZSTD_createCCtx(), _lib.ZSTD_freeCCtx)
        for number, value in parameters.items():
            _check(_lib.ZSTD_CCtx_setParameter(self._context, _ffi.cast("ZSTD_cParameter", number), value))

    def encode(self, plane: Bytes, stream: int, out: Bytes) -> list[int]:
        """Code each ``stream`` bytes of ``plane`` as one frame, one behind the other into ``out``; the frames' sizes in bytes.

        ``out`` must be 0.5 % and 512 bytes larger than ``plane``.
        """
        sizes = np.empty(-(-plane.size // stream), np.uint64)
        _check(_encode(_address(self._context), plane, stream, out, sizes))
        return [int(size) for size in sizes]


_local = threading.local()


def decode(coded: Bytes, sizes: Sequence[int] | Words, stream: int, plane: Bytes) -> None:
    """Decode frames of the given sizes, which add up to ``coded``, each to ``stream`` bytes of ``plane``, the last to the rest.

    A frame that is malformed, or decodes to another number of bytes, raises ``Damaged``; nothing is written outside ``plane``.
    """
    context = getattr(_local, "context", None)
    if context is None:
        context = _local.context = _ffi.gc(_lib.ZSTD_createDCtx(), _lib.ZSTD_freeDCtx)
    got = _decode(_address(context), coded, np.array(sizes, np.uint64), stream, plane)
    if _lib.ZSTD_isError(got):
        raise Damaged(f"zstd: {_ffi.string(_lib.ZSTD_getErrorName(got)).decode()}")
    if got != plane.size:
        raise Damaged(f"zstd: a stream does not decode to the {stream} bytes that were expected, or to the rest of its plane")


def _encode(context: int, plane: Bytes, stream: int, out: Bytes, sizes: Words) -> int:
    """Fill ``sizes``; 0 or an error code."""
    found = kernels.library()
    if found is None:
        return int(numpy_loops.zstd_encode(context, plane, stream, out, sizes))
    where, one = kernels.address, function("ZSTD_compress2")
    return int(found.zstd_encode(one, context, where(plane), plane.size, stream, where(out), out.size, where(sizes)))


def _decode(context: int, coded: Bytes, sizes: Words, stream: int, plane: Bytes) -> int:
    """The number of bytes decoded until all were or one frame had the wrong size, or an error code."""
    found = kernels.library()
    if found is None:
        return int(numpy_loops.zstd_decode(context, coded, sizes, stream, plane))
    if int(sizes.sum()) > coded.size:
        raise ValueError("the frames have more bytes than the data")
    where, one = kernels.address, function("ZSTD_decompressDCtx")
    got = found.zstd_decode(one, context, where(coded), where(sizes), sizes.size, stream, where(plane), plane.size)
    return int(got)


def function(name: str) -> int:
    """The address of a function of the library."""
    return _address(_ffi.addressof(_lib, name))


def _address(pointer: Any) -> int:
    return int(_ffi.cast("uintptr_t", pointer))


def _check(code: int) -> None:
    if _lib.ZSTD_isError(code):
        raise RuntimeError(f"zstd: {_ffi.string(_lib.ZSTD_getErrorName(code)).decode()}")
