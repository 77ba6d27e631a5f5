"""Writes files that are complete or absent, even after a power cut: temporary file, fsync, rename, fsync."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from ..object_store import Buffer
from ..runtime.clock import Clock
from . import direct_io

TEMPORARY = ".raystow.tmp-"

_IOV_MAX = 1024
_ATTEMPTS = 100


def write(root: Path, key: str, parts: Sequence[Buffer], clock: Clock, *, kept: bool = False) -> None:
    """Replace the file ``key`` under ``root`` by the concatenation of ``parts``. After an ``OSError`` the old file is untouched
    or, if only the last fsync failed, either of the two is there, complete. ``kept``: see ``LocalStore``.

    Many threads of a node worker write packs at the same time: without objects for paths they hold the interpreter lock for a
    fraction of the time.
    """
    path = os.path.join(root, key)
    folder = os.path.dirname(path)
    temporary, descriptor = _open_temporary(folder, clock)
    try:
        try:
            _write_all(descriptor, parts, kept)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folders(root, key)


def sync_folders(root: Path, key: str) -> None:
    """Make the name of a file durable, and those of its folders up to the root: another process may have created one and not
    synced it yet. To sync a clean folder costs microseconds."""
    folder = os.path.dirname(os.path.join(root, key))
    for _ in range(key.count("/") + 1):
        # A folder that is gone was emptied: the object was deleted since.
        with contextlib.suppress(FileNotFoundError):
            _sync_folder(folder)
        folder = os.path.dirname(folder)


def make_folder(path: Path) -> None:
    """Create ``path`` and its missing parents, durably."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):
            each.mkdir()
        _sync_folder(each.parent)


def _open_temporary(folder: str, clock: Clock) -> tuple[str, int]:
    # ``delete`` removes empty folders, also one just created: then create it again. With the temporary file in it, it stays.
    for attempt in range(_ATTEMPTS):
        path = f"{folder}/{TEMPORARY}{clock.token()}"
        try:
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            if attempt == _ATTEMPTS - 1:
                raise
            with contextlib.suppress(FileNotFoundError):
                make_folder(Path(folder))
    raise AssertionError("unreachable")


def _write_all(descriptor: int, parts: Sequence[Buffer], kept: bool) -> None:
    views = [view for part in parts if (view := memoryview(part).cast("B")).nbytes]
    waiting = direct_io.write(descriptor, views, copy=kept)
    waiting.reverse()
    while waiting:
        written = os.writev(descriptor, waiting[: -_IOV_MAX - 1 : -1])
        while written:
            head = waiting.pop()
            if written < head.nbytes:
                waiting.append(head[written:])
                break
            written -= head.nbytes


def _sync_folder(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
