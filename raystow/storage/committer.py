"""The writing side of a repository: an epoch, and the one step that makes an attempt a version."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .coding.digest import stored_digest
from .errors import Fenced, SaveFailed
from .format import keys
from .format.root import Entry, Root
from .format.signing import Signer, Trust
from .format.version_record import VersionRecord
from .object_store import ObjectStore
from .version import Version

if TYPE_CHECKING:
    from .repository import Repository


class Committer:
    """Commits under one epoch. Taking a newer epoch elsewhere makes every later commit here raise ``Fenced``."""

    def __init__(self, repository: Repository, owner: str, signer: Signer | None = None) -> None:
        """Take the next epoch for ``owner``, a name that no other committer has ever had. ``signer`` signs what is committed.

        ``Untrusted``, and no epoch is taken, if the repository or this process would not read what is signed so.
        """
        for trust in (Trust(repository.signed_by), repository.trust):
            trust.admit(signer)
        self.repository, self._signer = repository, signer
        self._records: dict[Entry, bytes] = {}

        def take(root: Root) -> Root:
            return root if root.owner == owner else replace(root, epoch=root.epoch + 1, owner=owner)

        root = repository.register.update(take)
        self.epoch, self.owner, self._next_id = root.epoch, owner, root.next_id

    @property
    def signs(self) -> bool:
        """Whether what is committed gets a signature."""
        return self._signer is not None

    def reserve(self) -> tuple[int, str]:
        """An id and attempt for the next version. Ids ascend; one whose attempt fails is never used again by this epoch."""
        id = self._next_id
        self._next_id += 1
        return id, self.repository.clock.token()

    def commit(self, record: VersionRecord) -> Version:
        """Make ``record`` a version: write the record, then swap the root. Fragments and packs are durable by now.

        Raises ``Fenced`` if a newer epoch was taken, ``SaveFailed`` if a newer version or a collection has spent the id or
        what it is a difference to is gone, and ``StoreUnavailable`` if the store gave no answer in time: then the version may
        or may not exist, and calling again with the same record settles it.
        """
        entry, data = put_record(self.repository.store, record, self._signer)
        self._records = {base: data for base, data in self._records.items() if base.id in entry.bases} | {entry: data}

        def add(root: Root) -> Root:
            if entry in root.versions:
                return root  # done before; the answer was lost
            self.check(root)
            if entry.id < root.next_id:  # also if that version was there once, and retention has dropped it
                self._next_id = max(self._next_id, root.next_id)
                raise SaveFailed(f"id {entry.id} is spent: the next version is {root.next_id}", subject=keys.ROOT)
            if gone := set(entry.bases) - {other.id for other in root.versions if other.resumable}:
                what = f"it is a difference to version {min(gone)}, which is not there any more, or not all of it"
                raise SaveFailed(what, subject=keys.ROOT)
            return replace(root, next_id=entry.id + 1, versions=(*root.versions, entry))

        self.repository.register.update(add)
        return self.repository.at(entry)

    def record(self, entry: Entry) -> bytes:
        """The record of the version committed last, or of what that is a difference to, if ``entry`` is one of them: nothing else
        is remembered."""
        return self._records.get(entry, b"")

    def discard(self, id: int, attempt: str) -> None:
        """Delete the objects of an attempt that this epoch gave up; one that is or was a version is left alone.

        Safe, since only the epoch that reserved an attempt can commit it, and it decides once. It may have been a version though
        its commit raised ``Fenced``: if no answer came, and newer epochs had committed and dropped by the time that the root was
        read again. Then a collection deletes it, when nobody reads it any more.
        """
        root = self.repository.root()
        were = [(entry.id, entry.attempt) for entry in root.versions] + [(d.id, d.attempt) for d in root.dropped]
        if (id, attempt) in were:
            return
        store = self.repository.store
        store.delete([info.key for info in store.list(keys.prefix(id, attempt))])

    def check(self, root: Root) -> None:
        """Raise ``Fenced`` if another has taken a newer epoch; or, after a repair that could not know of this one, the same."""
        if (root.epoch, root.owner) != (self.epoch, self.owner):
            raise Fenced(
                f"epoch {root.epoch} of {root.owner!r} has replaced epoch {self.epoch}",
                subject=keys.ROOT,
                remedy="let the newer coordinator work, or stop it first",
            )


def put_record(store: ObjectStore, record: VersionRecord, signer: Signer | None) -> tuple[Entry, bytes]:
    """Write a version's record and, with a ``signer``, its signature. How the root lists it, and the record's bytes."""
    data = record.dump()
    digest = stored_digest(data)
    store.put(record.key(), [data])
    if signer is not None:
        signature = signer.sign(record.repository, record.id, record.attempt, digest)
        store.put(keys.signature(record.id, record.attempt), [signature])
    return record.entry(digest, len(data)), data
