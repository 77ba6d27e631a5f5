"""Pointers: what a ``ray.train.Checkpoint`` of raystow's holds. One small JSON file, in a folder of its own in the run's.

The folder's name says which version it is, and no other ever gets that name: Ray Train cannot resume a run that has reported one
twice.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ....storage.errors import Damaged, NotFound, StateError
from ....storage.format import records
from ....storage.format.root import Entry
from ....storage.repository import Repository, open_repository
from ....storage.version import Version
from ...placement import placement
from ...restore import restore as restore_version

Identity = tuple[int, str]
"""A version's id and the attempt that it was when it was saved: no two versions have the same, in whatever repository."""

FILE = "pointer.json"
_FOLDER = re.compile(r"raystow-(\d{8,})-([0-9a-f]+)")
_MAX_POINTER = 64 << 10


class Checkpoint(Protocol):
    """A ``ray.train.Checkpoint``: a folder ``path`` of a pyarrow file system."""

    path: str
    filesystem: Any


@dataclass(frozen=True)
class Pointer:
    """``uri``, ``repository``: where the version is, and that repository's id. ``version``, ``attempt``: its ``Identity``."""

    uri: str
    repository: str
    version: int
    attempt: str
    step: int

    def dump(self) -> bytes:
        """The bytes of the file."""
        return json.dumps({"raystow": asdict(self)}, indent=1).encode()

    @staticmethod
    def load(data: bytes, path: str) -> Pointer:
        """Parse and check; ``Damaged`` naming ``path``."""
        try:
            fields = json.loads(data)["raystow"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise Damaged("not a pointer to a version", subject=path) from error
        if not isinstance(fields, dict):
            raise Damaged("not a pointer to a version", subject=path)
        texts = {name: records.field(fields, name, str, path) for name in ("uri", "repository", "attempt")}
        return Pointer(**texts, **{name: records.field(fields, name, int, path) for name in ("version", "step")})


def folder(entry: Entry) -> str:
    """The name of a version's pointer among the checkpoints of a run."""
    return f"raystow-{entry.id:08d}-{entry.origin}"


def identity(path: str) -> Identity | None:
    """Which version a checkpoint at this path points to, by its name; None if it is none of raystow's."""
    name = _FOLDER.fullmatch(path.rstrip("/").rpartition("/")[2])
    return (int(name[1]), name[2]) if name is not None else None


def write(repository: Repository, entry: Entry, filesystem: Any, path: str) -> None:
    """Make the pointer to a version in the folder ``path`` of a pyarrow file system. Raises ``OSError``."""
    pointer = Pointer(repository.uri, repository.id, entry.id, entry.origin, entry.step)
    filesystem.create_dir(path)
    with filesystem.open_output_stream(f"{path}/{FILE}") as stream:
        stream.write(pointer.dump())


def read(checkpoint: Checkpoint) -> Pointer:
    """What a checkpoint points to. ``NotFound`` if its file is gone, ``StateError`` if it never was raystow's, ``Damaged``."""
    path = f"{checkpoint.path}/{FILE}"
    try:
        with checkpoint.filesystem.open_input_stream(path) as stream:
            data = stream.read(_MAX_POINTER)
    except FileNotFoundError:
        if identity(checkpoint.path) is None:
            remedy = f"raystow's have a file {FILE}"
            raise StateError("the checkpoint is no pointer to a version", subject=checkpoint.path, remedy=remedy) from None
        remedy = "take another of the run's, or raystow.open(uri).versions()"
        raise NotFound("the checkpoint is gone: Ray Train has dropped it", subject=path, remedy=remedy) from None
    return Pointer.load(data, path)


def version_of(checkpoint: Checkpoint, *, uri: str | os.PathLike[str] | None = None) -> Version:
    """The version that a ``ray.train.Checkpoint`` of raystow's points to; anywhere, with or without a cluster.

    ``uri``: where the repository is now, if it was moved since. ``NotFound`` if the pointer or the version is gone,
    ``StateError`` if the checkpoint is none of raystow's; and what ``raystow.open`` raises.
    """
    return _find(checkpoint, uri)[1]


def restore(
    checkpoint: Checkpoint,
    into: dict[str, Any],
    *,
    strict: bool = True,
    cast: bool = False,
    uri: str | os.PathLike[str] | None = None,
) -> Version:
    """Fill ``into`` from the version that a ``ray.train.Checkpoint`` points to, be it the newest or not; that version.

    As ``raystow.restore_latest`` does it, for a validation function, say, or to go on from the best version. Each rank of several
    calls it. Raises what ``version_of`` and ``restore_latest`` raise; ``Damaged`` has no other version to fall back to.
    """
    repository, version = _find(checkpoint, uri)
    rank, world_size = placement()
    with repository.lease(version):
        restore_version(version, into, rank=rank, world_size=world_size, strict=strict, cast=cast)
    return version


def _find(checkpoint: Checkpoint, uri: str | os.PathLike[str] | None) -> tuple[Repository, Version]:
    pointer = read(checkpoint)
    repository = open_repository(os.fspath(uri or pointer.uri))
    if repository.id != pointer.repository:
        what = f"the pointer is into repository {pointer.repository}, but here is {repository.id}"
        raise NotFound(what, subject=repository.uri, remedy="pass uri= if that one was moved")
    versions = repository.versions()
    for version in versions:
        if (version.id, version.entry.origin) == (pointer.version, pointer.attempt):
            return repository, version
    there = ", ".join(str(version.id) for version in versions[-10:]) or "none"
    what = f"version {pointer.version} (step {pointer.step}) is not there any more: retention or somebody has dropped it"
    raise NotFound(what, subject=repository.uri, remedy=f"the newest that are there: {there}")
