"""Writes around the page cache, from a node's memory to its disk.

The newest objects are in the node's memory already: a second copy in the page cache takes as much memory again, and new pages for
each object, which the kernel must find, fill and write back.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import mmap
import os
import queue
from collections.abc import Iterator, Sequence

import numpy as np

from . import mounts

logger = logging.getLogger(__name__)

LEAST = 1 << 20
"""Bytes below which the page cache is faster."""

GATHERED = 1 << 20
"""Bytes of a buffer for what is not whole pages: what is copied into it stays in a core's cache until it is written. There are as
many as threads have written such objects at a time."""

_KINDS = ("ext4", "xfs", "overlay")  # of local disks; how others behave was not tried
_PIECE = 16 << 20
_idle: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()  # buffers of ``GATHERED`` bytes


def write(descriptor: int, parts: Sequence[memoryview], *, copy: bool) -> list[memoryview]:
    """Write buffers one after another to a file, at its position; return the rest, all of it if they do not go directly.

    What goes directly are whole pages: those of a single buffer that begins with a page, and with ``copy`` others, through a
    buffer of ``GATHERED`` bytes.
    """
    size = sum(part.nbytes for part in parts) & -mmap.PAGESIZE
    in_place = len(parts) == 1 and np.frombuffer(parts[0], np.uint8).ctypes.data % mmap.PAGESIZE == 0
    if size < LEAST or not (in_place or copy):
        return [*parts]
    device = os.fstat(descriptor).st_dev
    if (why := refused(device)) is not None:
        _say(device, why)
        return [*parts]
    pieces = _pages(parts[0], size) if in_place else _gathered(parts, size)
    flags, done = fcntl.fcntl(descriptor, fcntl.F_GETFL), 0
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        for piece in pieces:
            while piece:
                written = os.write(descriptor, piece)
                piece, done = piece[written:], done + written
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _say(device, "the file system refuses direct writes")
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return _after(parts, done)


def _after(parts: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return what follows the first ``done`` bytes of the parts."""
    rest = list[memoryview]()
    for part in parts:
        rest += [part[done:]] if done < part.nbytes else []
        done = max(0, done - part.nbytes)
    return rest


def _pages(data: memoryview, size: int) -> Iterator[memoryview]:
    for start in range(0, size, _PIECE):
        yield data[start : min(start + _PIECE, size)]


def _gathered(parts: Sequence[memoryview], size: int) -> Iterator[memoryview]:
    """Yield the first ``size`` bytes of the parts in a buffer, which is filled again and again."""
    try:
        memory = _idle.get_nowait()
    except queue.Empty:
        memory = mmap.mmap(-1, GATHERED)
    buffer, used, left = np.frombuffer(memory, np.uint8), 0, size
    for part in parts:
        source = np.frombuffer(part, np.uint8)[:left]
        left -= len(source)
        while len(source):
            taken = source[: GATHERED - used]
            np.copyto(buffer[used : used + len(taken)], taken)  # without the interpreter lock
            source, used = source[len(taken) :], used + len(taken)
            if used == GATHERED or not (left or len(source)):
                yield buffer[:used].data
                used = 0
    _idle.put(memory)


@functools.cache
def refused(device: int) -> str | None:
    """Why nothing is written directly to the file system with this number; None if it is."""
    kind = mounts.kind_of(device)
    return None if kind in _KINDS else f"direct writes are not used on {kind or 'this kind of file system'}"


@functools.cache
def _say(device: int, why: str) -> None:
    """Log once for each file system."""
    logger.info("%s: objects are written through the page cache", why)
