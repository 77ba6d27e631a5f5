"""The loops over the frames of a plane, compiled by numba. Imported when they are needed, as ``loops`` is."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding  # type: ignore[import-untyped]
from numba import types
from zstandard import backend_cffi

from .loops import compiled
from .words import Bytes, Words


def _external(name: str) -> Any:
    """A function of the library for compiled code to call by name, so that the code can be cached on disk. It takes (context,
    target, its size, source, its size), pointers as integers, and gives a size or an error code beyond all sizes."""
    symbol = f"raystow_{name}"
    address = backend_cffi.ffi.cast("uintptr_t", backend_cffi.ffi.addressof(backend_cffi.lib, name))
    binding.add_symbol(symbol, int(address))
    return types.ExternalFunction(symbol, types.uint64(*[types.uint64] * 5))


_compress, _decompress = _external("ZSTD_compress2"), _external("ZSTD_decompressDCtx")


@compiled
def encode(context: int, plane: Bytes, stream: int, out: Bytes, sizes: Words) -> Any:
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
def decode(context: int, coded: Bytes, sizes: Words, stream: int, plane: Bytes) -> Any:
    """The number of bytes decoded until all were or one frame had the wrong size, or an error code."""
    end = 0
    for i in range(sizes.size):
        target, size = plane[i * stream : (i + 1) * stream], np.int64(sizes[i])
        got = _decompress(context, target.ctypes.data, target.size, coded.ctypes.data + end, size)
        if got != np.uint64(target.size):
            return got if got > np.uint64(plane.size) else np.uint64(i * stream)
        end += size
    return np.uint64(plane.size)
