"""Writes around the page cache, from the pages of a node's memory straight to its disk.

The newest objects are in the node's memory already: a second copy in the page cache takes as much memory again, and to make it
takes the time of cores that the training needs.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import mmap
import os

import numpy as np

from . import mounts

logger = logging.getLogger(__name__)

LEAST = 1 << 20
"""Bytes of a buffer below which the page cache is faster."""

_KINDS = ("ext4", "xfs", "overlay")  # of local disks; how others behave was not tried
_PIECE = 16 << 20


def write(descriptor: int, data: memoryview) -> int:
    """Write the beginning of a buffer to a file, at its position; return the number of bytes, 0 if that does not go directly.

    What goes directly are whole pages of a buffer that begins with a page.
    """
    size = data.nbytes & -mmap.PAGESIZE
    if size < LEAST or np.frombuffer(data, np.uint8).ctypes.data % mmap.PAGESIZE:
        return 0
    device = os.fstat(descriptor).st_dev
    if (why := refused(device)) is not None:
        _say(device, why)
        return 0
    flags, done = fcntl.fcntl(descriptor, fcntl.F_GETFL), 0
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        while done < size:
            done += os.write(descriptor, data[done : min(done + _PIECE, size)])
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _say(device, "the file system refuses direct writes")
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return done


@functools.cache
def refused(device: int) -> str | None:
    """Why nothing is written directly to the file system with this number; None if it is."""
    kind = mounts.kind_of(device)
    return None if kind in _KINDS else f"direct writes are not used on {kind or 'this kind of file system'}"


@functools.cache
def _say(device: int, why: str) -> None:
    """Log once for each file system."""
    logger.info("%s: objects are written through the page cache", why)
