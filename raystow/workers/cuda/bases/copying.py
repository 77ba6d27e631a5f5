"""Copies in host memory, many in one call that leaves the interpreter to others.

Whoever copies shares that interpreter with the training, which has to launch kernels in time: each time that a thread wants it
back the training stops for a moment, or the thread waits for milliseconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import binding  # type: ignore[import-untyped]
from numba import types

_NAME = "raystow_memcpy"
binding.add_symbol(_NAME, ctypes.cast(ctypes.CDLL(None).memcpy, ctypes.c_void_p).value)
_memcpy = types.ExternalFunction(_NAME, types.uint64(types.uint64, types.uint64, types.uint64))


_compiled: Callable[[Callable[[Any], None]], Callable[[Any], None]] = numba.njit(
    "void(int64[:, ::1])",  # so that it is compiled before the first save that needs it
    cache=True,
    nogil=True,
)


@_compiled
def copy(pieces: Any) -> None:
    """Copy ``pieces``: int64 [n, 3], from which address, to which, and how many bytes. The caller holds all that memory."""
    for i in range(pieces.shape[0]):
        _memcpy(pieces[i, 1], pieces[i, 0], pieces[i, 2])
