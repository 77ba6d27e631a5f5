"""The writing side of a repository: an epoch, and the one step that makes an attempt a version."""

from __future__ import annotations

from dataclasses import replace

from . import keys
from .digest import stored_digest
from .errors import Fenced
from .repository import Repository
from .root import Entry, Root
from .version import Version
from .version_record import VersionRecord


class Committer:
    """Commits under one epoch. Taking a newer epoch elsewhere makes every later commit here raise ``Fenced``."""

    def __init__(self, repository: Repository, owner: str) -> None:
        """Take the next epoch for ``owner``, a name that no other committer has ever had."""
        self.repository = repository

        def take(root: Root) -> Root:
            return root if root.owner == owner else replace(root, epoch=root.epoch + 1, owner=owner)

        root = repository.register.update(take)
        self.epoch, self._next_id = root.epoch, root.next_id

    def reserve(self) -> tuple[int, str]:
        """An id and attempt for the next version. Ids ascend; one whose attempt fails is never used again by this epoch."""
        id = self._next_id
        self._next_id += 1
        return id, self.repository.clock.token()

    def commit(self, record: VersionRecord) -> Version:
        """Make ``record`` a version: write the record, then swap the root. Fragments and packs are durable by now.

        Raises ``Fenced`` if a newer epoch was taken, and ``StoreUnavailable`` if the store gave no answer in time: then the
        version may or may not exist, and calling again with the same record settles it.
        """
        data = record.dump()
        self.repository.store.put(record.key(), [data])
        entry = Entry(
            id=record.id,
            attempt=record.attempt,
            digest=stored_digest(data).hex(),
            size=len(data),
            step=record.step,
            created=record.created,
            raw=record.raw,
            stored=record.stored,
        )

        def add(root: Root) -> Root:
            if entry in root.versions:
                return root  # done before; the answer was lost
            self._check(root)
            if entry.id < root.next_id:  # also if that version was there once, and retention has dropped it
                raise Fenced(f"id {entry.id} is spent: the next version is {root.next_id}", subject=keys.ROOT)
            return replace(root, next_id=entry.id + 1, versions=(*root.versions, entry))

        self.repository.register.update(add)
        return Version(self.repository.store, entry, self.repository.id)

    def discard(self, id: int, attempt: str) -> None:
        """Delete the objects of an attempt that this epoch gave up; one that is a live version is left alone.

        Safe, since only the epoch that reserved an attempt can commit it, and it decides once.
        """
        if any(entry.attempt == attempt for entry in self.repository.root().versions):
            return
        store = self.repository.store
        store.delete([info.key for info in store.list(keys.prefix(id, attempt))])

    def _check(self, root: Root) -> None:
        if root.epoch != self.epoch:
            raise Fenced(
                f"epoch {root.epoch} of {root.owner!r} has replaced epoch {self.epoch}",
                subject=keys.ROOT,
                remedy="let the newer coordinator work, or stop it first",
            )
