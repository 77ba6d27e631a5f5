"""Pointers: the content of a ``ray.train.Checkpoint``, one small JSON file in a folder of its own that names the version.

The folder's name is unique to the version, since Ray Train cannot resume a run that has reported a name twice.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

from ...orchestrator.standalone.restore import restore as restore_version
from ...state.tree import State
from ...storage.errors import Damaged, NotFound, StateError
from ...storage.format import records
from ...storage.format.json_text import strict_json
from ...storage.format.root import Entry
from ...storage.repository import Repository, open_repository
from ...storage.versions.version import Version
from .storage import repository_in, store_in

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

Identity = tuple[int, str]
"""A version's id and the attempt that saved it: unique across repositories."""

FILE = "pointer.json"
_FOLDER = re.compile(r"raystow-(\d{8,})-([0-9a-f]+)")
_MAX_POINTER = 64 << 10


class Checkpoint(Protocol):
    """A ``ray.train.Checkpoint``: the folder ``path`` of a pyarrow file system. Reading a pointer imports no Ray."""

    path: str
    filesystem: FileSystem


@dataclass(frozen=True)
class Pointer:
    """The address and id of the repository, and the ``Identity`` and step of the version."""

    uri: str
    repository: str
    version: int
    attempt: str
    step: int

    def dump(self) -> bytes:
        return json.dumps({"raystow": asdict(self)}, indent=1).encode()

    @staticmethod
    def load(data: bytes, path: str) -> Pointer:
        """Parse and check the bytes of the file at ``path``; raise ``Damaged`` if they are invalid."""
        try:
            fields = strict_json(data.decode())["raystow"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise Damaged("not a pointer to a version", subject=path) from error
        if not isinstance(fields, dict):
            raise Damaged("not a pointer to a version", subject=path)
        return records.parse(Pointer, fields, path)


def folder(entry: Entry) -> str:
    """Return the folder name of the pointer to a version."""
    return f"raystow-{entry.id:08d}-{entry.origin}"


def identity(path: str) -> Identity | None:
    """Return the version that the name of a checkpoint's folder says; None if raystow did not write it."""
    name = _FOLDER.fullmatch(path.rstrip("/").rpartition("/")[2])
    return (int(name[1]), name[2]) if name is not None else None


def write(repository: Repository, entry: Entry, filesystem: FileSystem, path: str) -> None:
    """Write the pointer to a version into the folder ``path`` of a pyarrow file system. May raise ``OSError``."""
    pointer = Pointer(repository.uri, repository.id, entry.id, entry.origin, entry.step)
    filesystem.create_dir(path)
    with filesystem.open_output_stream(f"{path}/{FILE}") as stream:
        stream.write(pointer.dump())


def read(checkpoint: Checkpoint) -> Pointer:
    """Read the pointer of a checkpoint.

    Raises:
        NotFound: The file was deleted.
        StateError: raystow did not write the checkpoint.
        Damaged: The file is invalid.
    """
    path = f"{checkpoint.path}/{FILE}"
    try:
        with checkpoint.filesystem.open_input_stream(path) as stream:
            data = stream.read(_MAX_POINTER)
    except FileNotFoundError:
        if identity(checkpoint.path) is None:
            remedy = f"checkpoints of raystow contain a file {FILE}"
            raise StateError("the checkpoint does not point to a version", subject=checkpoint.path, remedy=remedy) from None
        remedy = "use another checkpoint of the run, or raystow.open(uri).versions()"
        raise NotFound("the checkpoint was dropped by Ray Train", subject=path, remedy=remedy) from None
    return Pointer.load(data, path)


def repository_of(checkpoint: Checkpoint, pointer: Pointer) -> Repository:
    """Open the repository of a pointer: with the checkpoint's file system if both are in the same folder."""
    try:
        beside = repository_in(checkpoint.filesystem, checkpoint.path.rstrip("/").rpartition("/")[0])
    except StateError:  # no repository can be in this file system
        beside = ""
    return open_repository(store_in(checkpoint.filesystem, pointer.uri) if pointer.uri == beside else pointer.uri)


def version_of(checkpoint: Checkpoint, *, uri: str | os.PathLike[str] | None = None) -> Version:
    """Return the version that a ``ray.train.Checkpoint`` points to. Needs no cluster.

    Args:
        checkpoint: A checkpoint that ``raystow.ray_train.Checkpointer`` reported.
        uri: Where the repository is now, if it was moved.

    Returns:
        The version.

    Raises:
        NotFound: The pointer or the version was dropped.
        StateError: The checkpoint does not point to a version.
        NotARepository: There is no repository at ``uri``.
    """
    pointer = read(checkpoint)
    repository = open_repository(os.fspath(uri)) if uri else repository_of(checkpoint, pointer)
    if repository.id != pointer.repository:
        what = f"the pointer is into repository {pointer.repository}, but this is {repository.id}"
        raise NotFound(what, subject=repository.uri, remedy="pass uri= if the repository was moved")
    versions = repository.versions()
    for version in (*versions, *repository.rolled_back()):
        if (version.id, version.entry.origin) == (pointer.version, pointer.attempt):
            return version
    there = ", ".join(str(version.id) for version in versions[-10:]) or "none"
    what = f"version {pointer.version} (step {pointer.step}) does not exist any more: it was dropped"
    raise NotFound(what, subject=repository.uri, remedy=f"the newest versions are {there}")


def restore(
    checkpoint: Checkpoint,
    into: State,
    *,
    strict: bool = True,
    allow_missing: str | Sequence[str] = (),
    allow_unused: str | Sequence[str] = (),
    cast: bool = False,
    uri: str | os.PathLike[str] | None = None,
) -> Version:
    """Fill ``into`` from the version that a ``ray.train.Checkpoint`` points to. Every rank calls this.

    Args:
        checkpoint: A checkpoint that ``raystow.ray_train.Checkpointer`` reported.
        into: See ``raystow.restore``.
        strict: See ``raystow.restore``.
        allow_missing: See ``raystow.restore``.
        allow_unused: See ``raystow.restore``.
        cast: See ``raystow.restore``.
        uri: Where the repository is now, if it was moved.

    Returns:
        The version.

    Raises:
        NotFound: The pointer or the version was dropped.
        StateError: The checkpoint does not point to a version, or ``into`` does not match the version.
        Damaged: The version is damaged; there is no fallback to another one.
    """
    version = version_of(checkpoint, uri=uri)
    restore_version(version, into, strict=strict, allow_missing=allow_missing, allow_unused=allow_unused, cast=cast)
    return version
