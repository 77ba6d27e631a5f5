"""Creates a folder or a file that appears complete or not at all.

It is made in a hidden folder of the same parent, with a lock file that is locked while its process lives. So another call knows
which of these folders killed processes have left, and deletes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ...storage.errors import StateError, StoreUnavailable
from ...storage.notebook import size
from ...storage.real_paths import output_path
from ...storage.runtime.clock import SYSTEM
from .finished_export import compare_files, not_empty
from .output_folder import Content, FilePlan, WriteFile

_LOCK, _CONTENT = "lock", "content"  # names in a hidden folder


@contextlib.contextmanager
def new_folder(path: Path, plan: FilePlan) -> Iterator[WriteFile]:
    """Yield what writes the files of ``plan`` into a folder; it becomes ``path`` if the block succeeds, and is removed if it
    fails. If ``path`` has these files already, they are compared instead.

    Raises:
        StateError: ``path`` exists and has other files or is none, is a mount point or a link to another folder, or its disk has
            too little free space.
        StoreUnavailable: Another process is writing it.
    """
    path = output_path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        if not path.is_dir():
            raise not_empty(str(path))
        discard_abandoned(path)
        sizes = {one.name: one.stat().st_size if one.is_file() else -1 for one in path.iterdir()}
        yield compare_files(plan, sizes, lambda name, start, nbytes: _read(path / name, start, nbytes), subject=str(path))
        return
    if path.is_mount():
        what, remedy = "is a mount point, which cannot be replaced", f"use a folder inside it: {path / 'restored'}"
        raise StateError(what, subject=str(path), remedy=remedy)
    with _moved_into_place(path, plan.nbytes) as work:
        work.mkdir()

        def write(name: str, nbytes: int, content: Content) -> None:
            with _durable_file(work / name) as sink:
                for part in content():
                    sink.write(part)

        yield write
        _sync(work)


@contextlib.contextmanager
def new_file(path: Path, nbytes: int) -> Iterator[IO[bytes]]:
    """Yield a file to write about ``nbytes`` to; it becomes ``path`` if the block succeeds, and is removed if it fails.

    Raises:
        StateError: ``path`` exists, is a link to another folder, or its disk has too little free space.
    """
    path = output_path(path)
    if path.exists():
        raise StateError("exists", subject=str(path), remedy="use a new name")
    with _moved_into_place(path, nbytes) as work, _durable_file(work) as sink:
        yield sink


@contextlib.contextmanager
def _moved_into_place(path: Path, nbytes: int) -> Iterator[Path]:
    """Yield a name in a hidden folder of the same parent for what becomes ``path``."""
    created = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    if discard_abandoned(path):
        raise StoreUnavailable("another process is writing it", subject=str(path), remedy="wait until it has ended")
    hidden = path.parent / f"{_hidden(path)}{SYSTEM.token()}"
    try:
        if (free := shutil.disk_usage(path.parent).free) < nbytes:
            what = f"needs {size(nbytes)}, but {size(free)} are free"
            raise StateError(what, subject=str(path), remedy="use a folder on another disk")
        hidden.mkdir()
        with _locked(hidden):
            yield hidden / _CONTENT
            os.rename(hidden / _CONTENT, path)  # atomic; fails if another process has filled the folder since
            _sync(path.parent)
            shutil.rmtree(hidden, ignore_errors=True)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a failed write names no file
        shutil.rmtree(hidden, ignore_errors=True)
        for parent in created:
            with contextlib.suppress(OSError):  # another process uses it by now
                parent.rmdir()
        raise


def discard_abandoned(path: Path) -> bool:
    """Delete what killed processes have left of ``path``. Returns whether another process is writing it now."""
    if not path.parent.is_dir():
        return False
    alive = False
    for name in sorted(os.listdir(path.parent)):
        hidden = path.parent / name
        if not name.startswith(_hidden(path)) or hidden.is_symlink() or not (hidden / _LOCK).is_file():
            continue  # without a lock file, its process has just begun
        with contextlib.suppress(OSError), _locked(hidden) as locked:  # it has ended meanwhile, or is another user's
            if locked:
                shutil.rmtree(hidden, ignore_errors=True)
            alive = alive or locked is False
    return alive


def _hidden(path: Path) -> str:
    return f".{path.name}.raystow-"


@contextlib.contextmanager
def _locked(hidden: Path) -> Iterator[bool | None]:
    """Lock a hidden folder while the block runs. Yields whether no other process has locked it; None if the file system has no
    locks: then nothing is known of other processes, and nothing of theirs is deleted."""
    descriptor = os.open(hidden / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        yield _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _read(path: Path, start: int, nbytes: int) -> bytes:
    with path.open("rb") as source:
        source.seek(start)
        return source.read(nbytes)


@contextlib.contextmanager
def _durable_file(path: Path) -> Iterator[IO[bytes]]:
    """Create a file that is on the disk when the block ends."""
    with path.open("xb") as sink:
        yield sink
        sink.flush()
        os.fsync(sink.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
