"""Zstandard as raystow uses it: standard frames (RFC 8878), coded either as literals only or with matches.

On exponent planes the best speed *and* ratio come from Huffman-coded literals without any search for matches. The library
does that only when told by a parameter that python-zstandard exposes through its CFFI interface and not through its classes,
so this module is the one place that speaks CFFI. CFFI calls release the GIL.
"""

from __future__ import annotations

import threading
from typing import Any

from zstandard import backend_cffi

from .errors import Damaged
from .kernels import Bytes

_ffi: Any = backend_cffi.ffi
_lib: Any = backend_cffi.lib

# ZSTD_cParameter numbers, from zstd.h.
_LEVEL, _WINDOW_LOG, _HASH_LOG, _MIN_MATCH, _TARGET_LENGTH, _STRATEGY, _LITERALS = 100, 101, 102, 105, 106, 107, 1002
_FAST, _ENABLE = 1, 1

LITERALS = {_LEVEL: -1, _WINDOW_LOG: 17, _TARGET_LENGTH: 131072, _LITERALS: _ENABLE}
"""Huffman-coded literals; steps of 128 KiB through the input leave no place to look for a match."""

MATCHES = {_LEVEL: 1, _WINDOW_LOG: 17, _HASH_LOG: 12, _MIN_MATCH: 7, _STRATEGY: _FAST, _LITERALS: _ENABLE}
"""The fast strategy with long matches only: what squared gradients and integer counters repeat is worth finding."""


class Encoder:
    """A compression context with fixed parameters. Not for several threads at once."""

    def __init__(self, parameters: dict[int, int]) -> None:
        self._context = _ffi.gc(_lib.ZSTD_createCCtx(), _lib.ZSTD_freeCCtx)
        for number, value in parameters.items():
            _check(_lib.ZSTD_CCtx_setParameter(self._context, _ffi.cast("ZSTD_cParameter", number), value))

    def encode(self, plane: Bytes, stream: int, out: Bytes) -> list[int]:
        """Code each ``stream`` bytes of ``plane`` as one frame, one behind the other into ``out``; the frames' sizes in bytes.

        ``out`` must have room for 0.5 % and 512 bytes more than ``plane``.
        """
        target, source = _pointer(out), _pointer(plane)
        sizes: list[int] = []
        end = 0
        for start in range(0, plane.size, stream):
            length = min(stream, plane.size - start)
            size = int(_check(_lib.ZSTD_compress2(self._context, target + end, out.size - end, source + start, length)))
            sizes.append(size)
            end += size
        return sizes


_local = threading.local()


def decode(coded: Bytes, sizes: list[int], stream: int, plane: Bytes) -> None:
    """Decode frames of the given sizes, which add up to ``coded``, each to ``stream`` bytes of ``plane``, the last to the rest.

    A frame that is malformed, or decodes to another number of bytes, raises ``Damaged``; nothing is written outside ``plane``.
    """
    context = getattr(_local, "context", None)
    if context is None:
        context = _local.context = _ffi.gc(_lib.ZSTD_createDCtx(), _lib.ZSTD_freeDCtx)
    source, target = _pointer(coded), _pointer(plane)
    for i, size in enumerate(sizes):
        expected = min(stream, plane.size - i * stream)
        got = _lib.ZSTD_decompressDCtx(context, target + i * stream, expected, source, size)
        source += size
        if _lib.ZSTD_isError(got):
            raise Damaged(f"zstd: {_ffi.string(_lib.ZSTD_getErrorName(got)).decode()}")
        if got != expected:
            raise Damaged(f"zstd: a stream of {got} bytes where {expected} were expected")


def _pointer(array: Bytes) -> Any:
    """A C pointer to a contiguous array, which the caller keeps alive."""
    return _ffi.cast("char *", array.ctypes.data)


def _check(code: Any) -> Any:
    if _lib.ZSTD_isError(code):
        raise RuntimeError(f"zstd: {_ffi.string(_lib.ZSTD_getErrorName(code)).decode()}")
    return code
