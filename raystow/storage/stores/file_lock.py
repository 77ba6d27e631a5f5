"""A lock on a file, exclusive among all threads and processes, with a deadline.

The kernel releases ``flock`` when its holder dies, so a crash never leaves a repository locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from ..errors import StoreUnavailable, UnsafeStore
from ..runtime.clock import Clock

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP)
_FIRST_WAIT, _LONGEST_WAIT = 0.001, 0.05

_threads: dict[Path, threading.Lock] = {}
_threads_guard = threading.Lock()
_held: set[int] = set()  # descriptors


def _forget() -> None:
    """In a forked process: its parent's threads, which hold the locks, do not run here."""
    global _threads_guard
    _threads_guard = threading.Lock()
    _threads.clear()
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def exclusive(path: Path, *, timeout: float, clock: Clock) -> Iterator[None]:
    """Lock the file at ``path``, which is created if missing and never removed: two processes that lock two files of one name
    would not exclude each other. Raises ``StoreUnavailable`` after ``timeout`` seconds, ``UnsafeStore`` on a file system without
    ``flock``."""
    deadline = clock.monotonic() + timeout
    # NFS turns flock into a lock of the whole process, which would let two threads of one process in together.
    with _threads_guard:
        thread_lock = _threads.setdefault(path, threading.Lock())
    if not thread_lock.acquire(timeout=timeout):
        raise _busy(path, timeout)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        _held.add(descriptor)
        try:
            wait = _FIRST_WAIT
            while not _try(descriptor, path):
                if clock.monotonic() >= deadline:
                    raise _busy(path, timeout)
                clock.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
            yield
        finally:
            _held.discard(descriptor)
            with contextlib.suppress(OSError):  # closing it does not unlock a file that a forked process has open, too
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
    finally:
        thread_lock.release()


def _try(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise UnsafeStore(
                "this file system has no flock",
                subject=str(path),
                remedy="mount it with locks (Lustre: option flock), or keep the repository elsewhere",
            ) from error
        raise
    return True


def _busy(path: Path, timeout: float) -> StoreUnavailable:
    return StoreUnavailable(
        f"another process has held the lock for {timeout:g} s",
        subject=str(path),
        remedy="find it with lslocks; a frozen one keeps it",
    )
