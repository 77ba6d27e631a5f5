"""A folder as an object store: atomic renames for objects, one lock file for the compare-and-swap.

For one machine, or a network file system whose ``flock`` works on all clients (see ``mounts``). A client that was cut off for
longer than the server's lease loses a network lock without noticing; S3's conditional writes have no such window.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from blake3 import blake3

from ..errors import Damaged, NotFound, StateError, StoreError, StoreFull, StoreUnavailable
from ..limits import MAX_ROOT
from ..object_store import Buffer, ObjectInfo, Tagged, Unfinished
from ..runtime.clock import SYSTEM, Clock
from . import checks, durable, mounts
from .file_lock import exclusive

_Result = TypeVar("_Result")

LOCK = ".raystow.lock"

_CORES = os.cpu_count() or 1
WRITERS = max(8, min(12, _CORES * 3 // 4), _CORES // 2)
"""Threads that write objects in parallel. On 16 cores, a save of 6.17 GB into ``/dev/shm`` is durable after .42 s with 8 of them,
and after .34 s with 12, which leave four cores to the training. Both take the same CPU time, and cost the training the same. On
32 cores, 24 are not faster than 16 (``benchmarks/results/store_writers-2026-11-27.json``)."""

_REPLACED = 2
"""How often a file that was replaced while it was read is opened again."""

_GONE = (FileNotFoundError, NotADirectoryError)
_REFUSED = {
    errno.EACCES: "give this user the right to read and write there",
    errno.EPERM: "give this user the right to read and write there",
    errno.EROFS: "this file system is read-only: use another folder",
    errno.ENOTDIR: "there is a file where a folder is needed: use another folder",
    errno.EISDIR: "there is a folder where a file is needed: use another folder",
    errno.EEXIST: "there is a file where a folder is needed: use another folder",
    errno.ENAMETOOLONG: "use a folder with a shorter path",
    errno.ELOOP: "remove one of the symbolic links, which lead in a circle",
}
_KINDS = {
    stat.S_IFIFO: "pipe",
    stat.S_IFLNK: "symbolic link",
    stat.S_IFSOCK: "socket",
    stat.S_IFBLK: "device",
    stat.S_IFCHR: "device",
}
_FULL = {
    errno.ENOSPC: f"free space on this file system: {checks.FREES_SPACE}",
    errno.EDQUOT: f"raise the quota, or free space: {checks.FREES_SPACE}",
}
_LATER = {errno.EFBIG: "this process or file system limits the size of files (ulimit -f)"}


class LocalStore:
    """Objects are files under ``root``; keys are paths below it. The first write creates the folder. ``kept``: what is written
    stays in memory elsewhere, so the page cache need not hold it. ``writers``: threads that write at a time."""

    def __init__(
        self, root: str | Path, *, clock: Clock = SYSTEM, lock_timeout: float = 30.0, kept: bool = False, writers: int = WRITERS
    ) -> None:
        # Resolved once: lock and mount are those of the real folder.
        try:
            self._root = Path(root).resolve()
        except (RuntimeError, OSError) as error:  # of pathlib: a circle of symbolic links
            raise StateError(f"the path cannot be resolved: {error}", subject=str(root), remedy=_REFUSED[errno.ELOOP]) from None
        self._clock, self._lock_timeout, self._kept = clock, lock_timeout, kept
        self._locks_hold = False
        self._unsynced: set[str] = set()  # keys of swaps that a power cut may still undo
        self._writers = threading.BoundedSemaphore(writers)

    range_bytes = 4 << 20
    """Bytes of a read above which larger reads are not faster."""

    @property
    def uri(self) -> str:
        """The folder as an absolute ``file://`` address."""
        return self._root.as_uri()

    def get(self, key: str, *, max_bytes: int) -> bytes:
        def read(file: int, size: int) -> bytes:
            if size > max_bytes:
                raise checks.too_large(self._subject(key), size, max_bytes)
            return self._read(file, key, 0, size)

        return self._opened(key, read)

    def get_range(self, key: str, start: int, length: int) -> Buffer:
        checks.checked_range(self._subject(key), start, length)

        def read(file: int, size: int) -> bytes:
            if start + length > size:
                raise checks.ends_early(self._subject(key), start, length)
            return self._read(file, key, start, length)

        return self._opened(key, read)

    def get_range_into(self, key: str, start: int, target: memoryview) -> None:
        subject, length = self._subject(key), target.nbytes
        checks.checked_range(subject, start, length)

        def read(file: int, size: int) -> None:
            if start + length > size:
                raise checks.ends_early(subject, start, length)
            done = 0
            while done < length:  # one call reads at most 2 GiB
                if not (count := os.preadv(file, [target[done:]], start + done)):
                    raise checks.ends_early(subject, start, length)  # it was cut meanwhile
                done += count

        self._opened(key, read)

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """As the protocol says: a temporary file, synced, renamed, and its folder synced."""
        checks.checked_key(key)
        with self._writers, self._errors(key):
            durable.write(self._root, key, parts, self._clock, kept=self._kept)

    def get_tagged(self, key: str, *, max_bytes: int) -> Tagged:
        # No lock is needed: a rename swaps whole files, so an open file has one content, the newest at that time.
        if key in self._unsynced:  # a writer that finds its own content takes it for durable
            with self._errors(key):
                durable.sync_folders(self._root, key)
            self._unsynced.discard(key)
        data = self.get(key, max_bytes=max_bytes)
        return Tagged(data, _tag(data))

    def put_if(self, key: str, data: bytes, tag: str | None) -> str:
        """As the protocol says. The tag is the content's digest: registers must never hold the same bytes twice."""
        path = self._path(key)
        if not self._locks_hold:
            mounts.refuse_unsafe(str(self._root))
            self._locks_hold = True
        with self._errors(key):
            durable.make_folder(self._root)
            with exclusive(self._root / LOCK, timeout=self._lock_timeout, clock=self._clock):
                if self._tag_of(key) != tag:
                    raise checks.stale(str(path))
                self._unsynced.add(key)
                durable.write(self._root, key, [data], self._clock)
                self._unsynced.discard(key)
                return _tag(data)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """As the protocol says, folder by folder, so that a long listing starts at once."""
        checks.checked_prefix(prefix)
        folder = prefix.rpartition("/")[0]
        with self._errors(prefix):
            for key, entry in self._walk(folder + "/" if folder else "", prefix):
                if key.startswith(prefix) and checks.is_key(key) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield ObjectInfo(key, status.st_size, status.st_mtime)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove the files, and the folders that this leaves empty."""
        # Not synced: an object that is back after a power cut is garbage.
        for key in keys:
            path = self._path(key)
            with self._errors(key):
                self._remove(path)

    def unfinished(self) -> Iterator[Unfinished]:
        """As the protocol says: temporary files. The key is that of their folder, the token their name."""
        with self._errors(""):
            for path, entry in self._walk("", ""):
                if entry.name.startswith(durable.TEMPORARY) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        yield Unfinished(path.rpartition("/")[0], entry.name, entry.stat(follow_symlinks=False).st_mtime)

    def abort(self, unfinished: Iterable[Unfinished]) -> None:
        """Remove temporary files. A writer that is still at work on one fails with ``StoreUnavailable``."""
        for write in unfinished:
            if not write.token.startswith(durable.TEMPORARY) or "/" in write.token:
                raise StoreError(f"not a temporary file: {write.token[:200]!r}", remedy="pass what unfinished() gave")
            with self._errors(write.key):
                self._remove((self._path(write.key) if write.key else self._root) / write.token)

    def __reduce__(self) -> tuple[Callable[[Path], LocalStore], tuple[Path]]:
        return LocalStore, (self._root,)

    def _path(self, key: str) -> Path:
        return self._root / checks.checked_key(key)

    def _subject(self, key: str) -> str:
        return str(self._path(key))

    def _remove(self, path: Path) -> None:
        """Unlink a file, and the folders that this leaves empty."""
        with contextlib.suppress(*_GONE):
            path.unlink()
        with contextlib.suppress(OSError):
            while (path := path.parent) != self._root:
                path.rmdir()

    def _opened(self, key: str, read: Callable[[int, int], _Result]) -> _Result:
        """Return what ``read`` returns for the descriptor and the size of an object. NFS calls a file stale that another machine
        has replaced since it was opened: then the new one is opened."""
        with self._errors(key):
            for _ in range(_REPLACED):
                try:
                    with self._open(key) as (file, size):
                        return read(file, size)
                except OSError as error:
                    if error.errno != errno.ESTALE:
                        raise
            with self._open(key) as (file, size):
                return read(file, size)

    @contextlib.contextmanager
    def _open(self, key: str) -> Iterator[tuple[int, int]]:
        """Open an object; yield its descriptor and its size. Restores read by many threads: without objects for path and file
        they hold the interpreter lock for a fraction of the time."""
        path = f"{self._root}/{checks.checked_key(key)}"
        try:
            self._check_kind(key, os.lstat(path).st_mode)  # before it is opened: a device may act on that
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except _GONE as error:
            raise checks.missing(path) from error
        try:
            status = os.fstat(file)
            self._check_kind(key, status.st_mode)
            yield file, status.st_size
        finally:
            os.close(file)

    def _check_kind(self, key: str, mode: int) -> None:
        """Raise unless the mode is that of a regular file."""
        if stat.S_ISDIR(mode):
            raise checks.missing(self._subject(key))
        if not stat.S_ISREG(mode):
            what = f"the object is no regular file, but a {_KINDS.get(stat.S_IFMT(mode), 'special file')}"
            raise Damaged(what, subject=self._subject(key), remedy="this is not what was written: use another version")

    def _tag_of(self, key: str) -> str | None:
        """The tag of an object; None if there is none."""
        try:
            with self._open(key) as (file, size):
                return _tag(self._read(file, key, 0, size)) if size <= MAX_ROOT else "too large to have been read"
        except NotFound:
            return None

    def _read(self, file: int, key: str, start: int, length: int) -> bytes:
        data = os.pread(file, length, start)
        while len(data) < length:  # one call reads at most 2 GiB
            if not (more := os.pread(file, length - len(data), start + len(data))):
                raise checks.ends_early(self._subject(key), start, length)
            data += more
        return data

    def _walk(self, below: str, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """What is in a folder, and in those below it that may have keys with the prefix, by path, in the order of keys."""
        try:
            with os.scandir(f"{self._root}/{below}") as entries:  # a folder sorts as its name with a slash, as its keys do
                found = sorted((f"{below}{e.name}{'/' if e.is_dir(follow_symlinks=False) else ''}", e) for e in entries)
        except _GONE:
            return
        for path, entry in found:
            if not path.endswith("/"):
                yield path, entry
            elif checks.is_key(path[:-1]) and (path.startswith(prefix) or prefix.startswith(path)):
                yield from self._walk(path, prefix)

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, str(error.errno))
            subject, what = f"{self._root}/{key}", f"{error.strerror or type(error).__name__} ({name})"
            if error.errno in _REFUSED:
                raise StoreError(what, subject=subject, remedy=_REFUSED[error.errno]) from error
            if error.errno in _FULL:
                raise StoreFull(what, subject=subject, remedy=_FULL[error.errno]) from error
            remedy = _LATER.get(error.errno or 0, "check the disk or the network mount, then try again")
            raise StoreUnavailable(what, subject=subject, remedy=remedy) from error


def _tag(data: bytes) -> str:
    return blake3(data).hexdigest()
