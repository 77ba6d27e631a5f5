"""A journal of the packs that a deep verification has found whole, so that an interrupted one can go on.

A file of JSON lines: ``{"journal": "raystow verify", "repository": id}``, then ``{"record": digest, "pack": key}`` for each pack.
The key names version and attempt; the digest of the record stands for all that the pack is checked against. A line that cannot be
read counts as not done.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ..errors import StateError
from ..real_paths import output_path, regular_file

_OTHER = "name a new file"


class VerifyJournal:
    """The packs that are done, and where to write down the next one. Made by ``journal``."""

    def __init__(self, file: IO[bytes], done: set[tuple[str, str]]) -> None:
        self._file, self._done = file, done

    def __contains__(self, pack: tuple[str, str]) -> bool:
        """Whether a pack, given as the digest of its version's record and its key, was found whole."""
        return pack in self._done

    def add(self, record: str, key: str) -> None:
        """Note that a pack was found whole; on return the operating system has the line. ``OSError`` if the disk is full."""
        self._file.write(_line({"record": record, "pack": key}))
        self._done.add((record, key))


@contextlib.contextmanager
def journal(path: Path, repository: str) -> Iterator[VerifyJournal]:
    """Open the journal at ``path``, or create it, for the repository with this id. ``StateError``, and the file is not changed,
    if it is of another repository, is no journal, is in use, or is a link to another folder."""
    head = _line({"journal": "raystow verify", "repository": repository})
    with regular_file(output_path(path), os.O_RDWR | os.O_APPEND | os.O_CREAT, buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the file is closed
        except BlockingIOError:
            raise StateError("another verification is writing to it", subject=str(path), remedy=_OTHER) from None
        file.seek(0)
        data = file.read()
        if not data.startswith(head) and not head.startswith(data):
            raise StateError(_what(data, repository), subject=str(path), remedy=_OTHER)
        file.truncate(data.rfind(b"\n") + 1)  # a last line may be incomplete: its writer was killed
        if len(data) < len(head):
            file.write(head)
        yield VerifyJournal(file, set(_entries(data[len(head) :])))


def _line(fields: dict[str, str]) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def _entries(data: bytes) -> Iterator[tuple[str, str]]:
    for line in data.splitlines(keepends=True):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            fields = json.loads(line)
            if line == _line(fields):
                yield fields["record"], fields["pack"]


def _what(data: bytes, repository: str) -> str:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        fields = json.loads(data.partition(b"\n")[0])
        if fields["journal"] == "raystow verify":
            return f"the file is of repository {fields['repository']}, not of {repository}"
    return "the file was not written by `raystow verify --resume`"
