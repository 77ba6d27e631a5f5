"""Creates a folder or a file that appears complete or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ...storage.errors import StateError
from ...storage.notebook import size
from ...storage.real_paths import output_path
from ...storage.runtime.clock import SYSTEM
from .output_folder import Content, WriteFile


@contextlib.contextmanager
def new_folder(path: Path, nbytes: int) -> Iterator[WriteFile]:
    """Yield what writes about ``nbytes`` into a folder; it becomes ``path`` if the block succeeds, and is removed if it fails.

    Raises:
        StateError: ``path`` exists and is not an empty folder, is a mount point or a link to another folder, or its disk has too
            little free space.
    """
    path = output_path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise StateError("is not an empty folder", subject=str(path), remedy="use a new one")
    if path.is_mount():
        what, remedy = "is a mount point, which cannot be replaced", f"use a folder inside it: {path / 'restored'}"
        raise StateError(what, subject=str(path), remedy=remedy)
    with _moved_into_place(path, nbytes) as work:
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
    """Yield a hidden name in the same folder for what becomes ``path``."""
    created = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.parent / f".{path.name}.raystow-{SYSTEM.token()}"
    try:
        if (free := shutil.disk_usage(path.parent).free) < nbytes:
            what = f"needs {size(nbytes)}, but {size(free)} are free"
            raise StateError(what, subject=str(path), remedy="use a folder on another disk")
        yield work
        os.rename(work, path)  # atomic; fails if another process has filled the folder since
        _sync(path.parent)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a failed write names no file
        shutil.rmtree(work, ignore_errors=True)
        work.unlink(missing_ok=True)  # a file, which rmtree leaves
        for parent in created:
            with contextlib.suppress(OSError):  # another process uses it by now
                parent.rmdir()
        raise


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
