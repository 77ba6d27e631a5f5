"""The store of a trial's repository, and its contents: everything that a crash can leave behind, not only objects."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from raystow.storage.format import keys
from raystow.storage.repository import Repository
from raystow.storage.stores import open_store
from raystow.storage.stores.local import LOCK

_AGO = 2 * 3600.0  # seconds
_AT_ONCE = 8


class Place(Protocol):
    """A store on which trials run."""

    name: str

    def empty(self, name: str) -> str:
        """Return the address for a new repository."""

    def copy(self, uri: str, name: str) -> str:
        """Copy a repository, and return the address of the copy."""

    def everything(self, uri: str) -> set[str]:
        """Return the keys of all contents, except for files that stay according to the documentation."""

    def remove(self, uri: str) -> None:
        """Delete a repository with all contents."""

    def age_leases(self, uri: str) -> None:
        """Make the leases of killed readers so old that they have expired."""


@dataclass(frozen=True)
class Folders:
    """Repositories in folders below ``base``."""

    base: Path
    name = "local"

    def empty(self, name: str) -> str:
        return (self.base / name).as_uri()

    def copy(self, uri: str, name: str) -> str:
        if self._folder(uri).exists():
            shutil.copytree(self._folder(uri), self.base / name)
        return (self.base / name).as_uri()

    def everything(self, uri: str) -> set[str]:
        folder = self._folder(uri)
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != LOCK}

    def remove(self, uri: str) -> None:
        shutil.rmtree(self._folder(uri))

    def age_leases(self, uri: str) -> None:
        for path in (self._folder(uri) / keys.LEASES).glob("*"):
            then = path.stat().st_mtime - _AGO
            os.utime(path, (then, then))

    def _folder(self, uri: str) -> Path:
        return Path(uri.removeprefix("file://"))


@dataclass(frozen=True)
class Prefixes:
    """Repositories in a bucket, below the prefix ``base``."""

    base: str
    name = "s3"

    def empty(self, name: str) -> str:
        return f"{self.base}/{name}"

    def copy(self, uri: str, name: str) -> str:
        source, target = open_store(uri), open_store(self.empty(name))
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda info: target.put(info.key, [source.get(info.key, max_bytes=1 << 30)]), source.list("")))
        return target.uri

    def everything(self, uri: str) -> set[str]:
        store = open_store(uri)
        return {info.key for info in store.list("")} | {write.key for write in store.unfinished()}

    def remove(self, uri: str) -> None:
        store = open_store(uri)
        store.delete([info.key for info in store.list("")])

    def age_leases(self, uri: str) -> None:
        store = open_store(uri)  # times on a server cannot be set, so the leases are deleted as if they had expired
        store.delete([info.key for info in store.list(keys.LEASES)])


def belonging(repository: Repository) -> set[str]:
    """Return the keys of all objects of the listed versions, and of marker and root."""
    return {keys.MARKER, keys.ROOT, *_of_versions(repository)}


def _of_versions(repository: Repository) -> Iterable[str]:
    for version in (*repository.versions(), *repository.rolled_back()):
        record = version.record
        yield record.key()
        yield from (keys.fragment(record.id, record.attempt, fragment.node) for fragment in record.fragments)
        yield from (keys.pack(record.id, record.attempt, pack.node, pack.group, pack.number) for pack in version.packs)
