"""A folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ...storage.clock import SYSTEM
from ...storage.errors import StateError
from .present import size


@contextlib.contextmanager
def new_folder(path: Path, nbytes: int) -> Iterator[Path]:
    """A folder to fill with about ``nbytes``, which becomes ``path`` if the block ends well and is removed if it does not.

    ``StateError`` if ``path`` is something else than a missing or empty folder, or if the disk lacks the room.
    """
    path = path.expanduser().resolve()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise StateError("is not an empty folder", subject=str(path), remedy="name a new one")
    if path.is_mount():
        raise StateError(
            "is a mount point, which nothing can be moved onto",
            subject=str(path),
            remedy=f"name a folder inside it: {path / 'restored'}",
        )
    made = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _moved_into_place(path, nbytes) as work:
            yield work
    except BaseException:
        for parent in made:
            with contextlib.suppress(OSError):  # in use by someone else now
                parent.rmdir()
        raise


@contextlib.contextmanager
def _moved_into_place(path: Path, nbytes: int) -> Iterator[Path]:
    free = shutil.disk_usage(path.parent).free
    if free < nbytes:
        raise StateError(
            f"{size(nbytes)} do not fit into the {size(free)} that are free",
            subject=str(path),
            remedy="name a folder on another disk",
        )
    work = path.parent / f".{path.name}.raystow-{SYSTEM.token()}"
    work.mkdir()
    try:
        yield work
        _sync(work)
        os.rename(work, path)  # atomic; fails if someone has filled the folder meanwhile
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


@contextlib.contextmanager
def durable_file(path: Path) -> Iterator[IO[bytes]]:
    """Create a file; it is on the disk when the block ends."""
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
