"""Commits: the epoch of a coordinator, and the swaps that make an attempt a version and stored entries a segment."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace

from ..errors import Damaged, InvariantError, NotARepository, NotFound, OutcomeUnknown, SaveFailed, StoreError
from ..format import capacity, keys
from ..format.root import REPAIRER, Entry, Root, Segment
from ..format.segment_record import SegmentRecord
from ..format.signature import VERSION, Signer
from ..format.version_record import VersionRecord
from ..object_store import ObjectStore
from ..root.invariants import Claims, Fence
from ..versions.version import Version
from .catalog import Catalog
from .segments import put_segment
from .signed_record import put_signed

UNKNOWN = "call result() again, or look for its step with `raystow ls URI`"
"""The remedy for an unknown outcome."""


class Committer:
    """Commits under one epoch. Once a newer epoch is taken elsewhere, every commit raises ``Fenced``."""

    def __init__(self, catalog: Catalog, owner: str, signer: Signer | None = None) -> None:
        """Take the next epoch. ``owner``: a name that no other committer has ever had. ``signer`` signs commits. ``Untrusted``,
        and no epoch is taken, if readers of the repository or this process would refuse the signature."""
        catalog.admit(signer)
        self.catalog, self._signer = catalog.trusting(signer), signer
        self._records: dict[Entry, bytes] = {}
        self._next_id, self._next_segment = 0, 1
        self._ids = threading.Lock()  # ids are reserved while another thread commits
        self.root: Root
        """The newest root that was read or written here."""
        self.replaced = False
        """Whether the root that the last commit found was ``outdated``, or the epoch was taken again meanwhile."""
        # Numbers of rollbacks, each with the first id that was reserved after it was noticed.
        self._noticed: tuple[tuple[int, int], ...] = ((0, 0),)
        self.take_over(owner)

    def take_over(self, owner: str) -> None:
        """Take the next epoch, again if another committer has taken one. What was reserved before must not be committed."""

        def take(root: Root) -> Root:
            self.root = root  # not compared with the one before: the numbers of a repaired root may be lower
            return root if root.owner == owner else replace(root, epoch=root.epoch + 1, owner=owner)

        root = self.catalog.register.update(take, final=())
        self.fence = Fence(root.epoch, owner)
        self._pass(root.next_id)
        self._next_segment = max(self._next_segment, root.next_segment)
        self.notice(root)

    @property
    def epoch(self) -> int:
        """The epoch under which it commits."""
        return self.fence.epoch

    def outdated(self, root: Root) -> bool:
        """Whether a root that was read now does not continue the one of this epoch: a repair has made it, or an older one was put
        back. Every commit raises ``Fenced`` then, although no other run writes here."""
        return root.owner.startswith(REPAIRER) or root.epoch < self.epoch

    @property
    def signs(self) -> bool:
        """Whether commits are signed."""
        return self._signer is not None

    @property
    def rollbacks(self) -> int:
        """The rollbacks of the repository that were noticed."""
        return self._noticed[-1][0]

    def notice(self, root: Root) -> Root:
        """Take notice of the root, and of a rollback: attempts whose ids were reserved before cannot be committed any more.

        Returns the newest root: a read may have been overtaken by a swap, and its root is ignored then.
        """
        with self._ids:
            if not root.is_older(self.root):
                self.root = root
            if root.rollbacks > self.rollbacks:
                self._noticed = (*self._noticed, (root.rollbacks, self._next_id))
            return self.root

    def rollbacks_at(self, id: int) -> int:
        """The rollbacks that were noticed when an id was reserved."""
        return [rollbacks for rollbacks, first in self._noticed if first <= id][-1]

    def is_current(self, id: int) -> bool:
        """Whether no rollback was noticed since an id was reserved."""
        return self.rollbacks_at(id) == self.rollbacks

    def reserve(self) -> tuple[int, str]:
        """An id and attempt for the next version. Ids ascend; this epoch uses no id twice, even if its attempt fails.

        Raises ``SaveFailed`` if the root cannot list another version.
        """
        capacity.check_root(self.root)
        with self._ids:
            id = self._next_id
            self._next_id += 1
        return id, self.catalog.clock.token()

    def commit(self, record: VersionRecord) -> Version:
        """Write a record, then swap the root: the attempt becomes a version. Fragments and packs are durable before.

        Raises ``Fenced`` if a newer epoch was taken, ``SaveFailed`` if the id is spent, a base is gone, or there was a rollback
        since the id was reserved, ``NotARepository`` if the repository was deleted or replaced, ``StoreError`` if the record
        could not be stored, and ``OutcomeUnknown`` if the store did not confirm the swap, or the root is lost: the version may
        exist then, or come back, and another call with the same record settles it.
        """
        entry, data = put_record(self.catalog.store, record, self._signer)
        self._records = {base: data for base, data in self._records.items() if base.id in entry.bases} | {entry: data}
        fence = self.fence

        def add(root: Root) -> Root:
            self._pass(root.next_id)
            self.replaced = self.outdated(root) or self.fence != fence
            self.notice(root)
            if entry in root.listed:
                return root  # done before; the answer was lost
            return root.with_version(entry)

        try:
            claims = Claims(fence, rollbacks=self.rollbacks_at(entry.id))
            root = self.catalog.register.update(add, claims, final=())  # a full store: versions are deleted meanwhile
        except InvariantError as error:
            raise SaveFailed(error.what, subject=error.subject) from error
        except (Damaged, NotFound, StoreError) as error:  # a repair may make it a version: all of it is stored
            what = f"the store did not confirm the commit: {error}"
            raise OutcomeUnknown(what, subject=f"version {entry.id}", remedy=UNKNOWN) from error
        self.notice(root)
        return self.catalog.at(entry)

    def reserve_segment(self) -> tuple[int, str]:
        """A number and attempt for the next segment. Numbers ascend, and this epoch uses none twice."""
        number = max(self._next_segment, self.root.next_segment)
        self._next_segment = number + 1
        return number, self.catalog.clock.token()

    def commit_segment(self, record: SegmentRecord, rollbacks: int) -> Segment | None:
        """Write a segment's record, then swap the root. The entries are durable before; None if a version has made them
        unnecessary.

        ``rollbacks``: those that were noticed when the number was reserved. Raises ``Fenced``, ``SaveFailed`` or ``StoreError``;
        after the last the segment may be in the root.
        """
        segment = put_segment(self.catalog.store, record, self._signer)
        fence = self.fence

        def add(root: Root) -> Root:
            self.replaced = self.outdated(root) or self.fence != fence
            self.notice(root)
            if segment in root.segments or any(entry.step >= segment.step for entry in root.versions[-1:]):
                return root
            return replace(root, segments=(*root.segments, segment), next_segment=max(root.next_segment, segment.number + 1))

        try:
            root = self.catalog.register.update(add, Claims(fence, rollbacks=rollbacks), final=())
        except InvariantError as error:
            raise SaveFailed(error.what, subject=error.subject) from error
        self.notice(root)
        return segment if segment in root.segments else None

    def record(self, entry: Entry) -> bytes:
        """The record of ``entry``, if it is the version committed last or one of its bases; else no bytes."""
        return self._records.get(entry, b"")

    def discard(self, id: int, attempt: str) -> None:
        """Delete the objects of an attempt that this epoch gave up, unless it is or was a version.

        Safe because only the epoch that reserved an attempt can commit it, and decides once. It may have been a version although
        its commit raised ``Fenced``: if that had no answer, and newer epochs have committed and dropped since. A collection
        deletes it then. In place of a repository that was deleted nobody lists the attempt.
        """
        with contextlib.suppress(NotARepository):
            root = self.catalog.root()
            were = [(entry.id, entry.attempt) for entry in root.listed] + [(d.id, d.attempt) for d in root.dropped]
            if (id, attempt) in were:
                return
        store = self.catalog.store
        store.delete([info.key for info in store.list(keys.prefix(id, attempt)) if keys.in_layout(info.key)])

    def _pass(self, next_id: int) -> None:
        """Reserve no id below this one from now on."""
        with self._ids:
            self._next_id = max(self._next_id, next_id)


def outcome_in(root: Root, id: int, attempt: str, *, over: bool = False) -> Entry:
    """Return the entry of the version that an attempt has become.

    Raises ``SaveFailed`` if it cannot become a version any more, ``NotFound`` if its version was dropped since, and
    ``OutcomeUnknown`` if its commit may still be under way. ``over``: whether nobody writes it any more.
    """
    for entry in root.listed:
        if entry.id == id and attempt in (entry.attempt, entry.saved):
            return entry
    subject = f"version {id}"
    if any((gone.id, gone.attempt) == (id, attempt) for gone in root.dropped):
        raise NotFound("the save became a version, which has been dropped since", subject=subject)
    if over or root.next_id > id:  # an id below next_id is spent: no pending write can commit it
        raise SaveFailed("the save became no version", subject=subject)
    raise OutcomeUnknown("the save is not a version yet", subject=subject, remedy=UNKNOWN)


def put_record(store: ObjectStore, record: VersionRecord, signer: Signer | None) -> tuple[Entry, bytes]:
    """Write a version's record and, with a ``signer``, its signature. Returns its entry for the root, and the record's bytes.

    Raises ``SaveFailed``, and writes nothing, if readers would refuse the record.
    """
    data, digest = put_signed(store, record, record.id, VERSION, signer)
    return record.entry(digest, len(data)), data
