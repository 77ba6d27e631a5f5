"""Where files really are. A folder may come from others, and have links to files of this machine: what is read of it could be
published, and what is written there could replace one of them.

So links lead out of no folder: an input is a regular file whose real path is in the folder that was given, and an output is in
its own. The path of the folder itself is the caller's, and may have links.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .errors import StateError

_SMALL = 32 << 20


def real_path(path: Path) -> Path:
    """Return the absolute path without links. Unlike ``Path.resolve``, it raises no error if links are a loop."""
    return Path(os.path.realpath(path))


def input_path(folder: Path, name: str | Path) -> Path:
    """Return the real path of ``name`` in ``folder``, whether it exists or not. In a snapshot of a Hugging Face cache it may be
    among the cache's blobs, which must be no links themselves.

    Raises:
        StateError: It is elsewhere.
    """
    home = real_path(folder)
    blobs = [home.parent.parent / "blobs"] if home.parent.name == "snapshots" else []
    return _inside(folder / name, [home, *blobs], "copy the file into the folder")


def output_path(path: Path) -> Path:
    """Return the real path of an output, whether it exists or not.

    Raises:
        StateError: It is a link to another folder.
    """
    if path.is_symlink():
        return _inside(path, [real_path(path.parent)], "give the path that it leads to")
    return real_path(path)


@contextmanager
def regular_file(path: Path, flags: int = os.O_RDONLY, *, buffering: int = -1) -> Iterator[IO[bytes]]:
    """Open a file for reading, or with other flags of ``os.open``, without waiting for the other end of a pipe.

    Raises:
        StateError: It is no regular file.
        OSError: It cannot be opened.
    """
    if "\0" in os.fspath(path):
        raise StateError("a path cannot contain a zero byte", subject=repr(os.fspath(path)))
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)  # of the open file, which cannot be exchanged
    except BaseException:
        os.close(descriptor)
        raise
    if not regular:
        os.close(descriptor)
        raise StateError("is not a regular file", subject=str(path), remedy="use another path")
    with open(descriptor, "rb" if flags == os.O_RDONLY else "r+b", buffering) as file:
        yield file


def small_file(path: Path) -> bytes:
    """Return the content of a file of at most 32 MiB: the largest are indices of weights.

    Raises:
        StateError: It is larger, or no regular file.
        OSError: It cannot be read.
    """
    with regular_file(path) as file:
        data = file.read(_SMALL + 1)
    if len(data) > _SMALL:
        raise StateError(f"has more than {_SMALL >> 20} MiB", subject=str(path), remedy="use another file")
    return data


def _inside(path: Path, folders: list[Path], remedy: str) -> Path:
    real = real_path(path)
    if not any(real.is_relative_to(folder) for folder in folders):
        raise StateError(f"leads out of its folder, to {real}", subject=str(path), remedy=remedy)
    return real
