"""Replacement: a version keeps its id, and is written again as another attempt that takes its place. Plan, explain, execute.

A ``Goal`` says what the version becomes: ``thin``, ``compact`` or ``redelta``. The same steps carry out each:

1. The new attempt is noted in the root (``rewrites``). A collection leaves noted attempts alone, or strikes out the note of one
   that was idle for the grace period.
2. The attempt is written, under leases on all that it is made from.
3. One swap of the root replaces the entry, drops the old attempt and removes the note. The invariants refuse the swap if the note
   is gone or what was read is not live any more, however late it comes. Readers of the old attempt have the grace period.

A replacement that is killed leaves an attempt that is no version, for a collection to find.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..commit import leases
from ..commit.catalog import Catalog
from ..commit.committer import put_record
from ..errors import Damaged, InvariantError, NotFound, Untrusted
from ..format import key_files, keys
from ..format.groups import WEIGHTS
from ..format.root import Dropped, Entry, Rewrite, Root
from ..format.signature import Signer
from ..format.version_record import Thinned, VersionRecord
from ..limits import MAX_SIGNATURE
from ..log import about
from ..root.invariants import Claims, Fence
from ..versions.version import Version
from . import rewrite
from .rewrite import Progress, Rewriting

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Goal:
    """What a version becomes, and on which conditions.

    ``outcome``: for the log. ``weights_only``: it keeps its weights only. ``recode``: chunks become deltas to ``base``, or whole
    without one; else they keep their base. ``bits``: mantissa bits to which weights are rounded. ``resumable``: how many newer
    versions must be complete. ``users``: ids of thinned versions that become deltas to this one afterwards.
    """

    outcome: str
    weights_only: bool = False
    recode: bool = True
    base: Entry | None = None
    bits: int | None = None
    resumable: int = 0
    users: tuple[int, ...] = ()

    def changes(self, entry: Entry) -> bool:
        """Whether an entry is not what it becomes. One that never held more than weights is thinned as well, so that the root
        says so."""
        return entry.resumable if self.weights_only else bool(entry.bases) == (self.base is None)

    def allows(self, root: Root, entry: Entry) -> bool:
        """Whether this root allows it: it is live, and neither the newest, nor the one verified last, nor pinned if it is
        to lose bits or become a delta, nor one of the last that can be resumed, nor the base of one that needs what it loses."""
        id = entry.id
        if entry not in root.versions or id == root.versions[-1].id or id == root.verified:
            return False
        if id in root.pins.values() and (self.weights_only or self.base is not None):
            return False
        if sum(newer.resumable for newer in root.versions if newer.id > id) < self.resumable:
            return False
        users = [user for user in root.listed if id in user.bases]  # a thinned one needs each bit of the weights
        return not (self.weights_only and any(user.resumable or self.bits is not None for user in users))


def thin(
    resumable: int, *, recode: bool = False, base: Entry | None = None, bits: int | None = None, users: Sequence[int] = ()
) -> Goal:
    """A version keeps its weights only, as they are stored; or with ``recode``, perhaps rounded, whole or as deltas to ``base``.

    No version may become a delta to another before that one is rounded. So the versions that are to be deltas to this one are
    written whole in their turn, and as deltas (``users``) once this one is rounded.
    """
    return Goal("thinned", weights_only=True, recode=recode, base=base, bits=bits, resumable=resumable, users=tuple(users))


def compact() -> Goal:
    """A delta is written whole, so that its base can be dropped. No bit changes."""
    return Goal("written whole")


def redelta(base: Entry) -> Goal:
    """A thinned version that is whole becomes a delta to another. No bit changes."""
    return Goal("written as a delta", base=base)


@dataclass(frozen=True)
class Replacement:
    """One version and what is written in its place. ``signer``: who signs that; None if the version is not signed."""

    catalog: Catalog
    version: Version
    goal: Goal
    rewriting: Rewriting
    signer: Signer | None

    @property
    def needed(self) -> bool:
        """Whether the version is not yet what it becomes."""
        return self.goal.changes(self.version.entry)

    @functools.cached_property
    def stored(self) -> int:
        """The stored bytes of the new attempt, estimated; for a version that is written whole, from a sample of its chunks."""
        return self.rewriting.stored if self.goal.weights_only or self.goal.base is not None else self.rewriting.sampled()

    def execute(self, fence: Fence | None = None, progress: Progress = lambda nbytes: None) -> Entry | None:
        """Write the version again and replace it; the new entry. None if the version stays as it is: it was dropped, leased or
        replaced meanwhile, or the root does not allow it any more.

        ``fence``: the epoch that must be in charge. ``progress``: called with numbers of stored bytes that were read, from
        several threads. Raises what reading and the store raise; then the version is as it was, unless the store gave no answer
        to the swap.
        """
        old, catalog = self.version, self.catalog
        note = self.note(fence)
        if note is None:
            return None
        with contextlib.ExitStack() as held:
            try:
                for version in filter(None, (old, self.rewriting.base)):
                    held.enter_context(catalog.lease(version))
            except NotFound:
                return None
            fragments = self.rewriting.execute(note.attempt, progress)
        now = catalog.now()
        record = replace(old.record, attempt=note.attempt, saved=old.entry.origin, fragments=fragments, packs=None)
        new, _ = put_record(catalog.store, self._thinned(record, now), self.signer)
        if (old.id, old.attempt) in leases.held(catalog.store, now) or not self._swap(note, new, now, fence):
            return None
        log = about(logger, repository=catalog.uri, version=new.id, attempt=new.attempt, step=new.step)
        log.info("version %d, step %d, was %s: %d bytes became %d", new.id, new.step, self.goal.outcome, old.bytes, new.stored)
        self._redelta_users(fence)
        return new

    def _thinned(self, record: VersionRecord, now: float) -> VersionRecord:
        """The record with what it says of thinning."""
        base, thinned = self.rewriting.base, record.thinned
        if self.goal.weights_only:
            record, thinned = replace(record, parts={}), Thinned(self.version.attempt, now, (WEIGHTS,), self.goal.bits)
        if thinned is None:
            return record
        return replace(record, thinned=replace(thinned, base_bits=base.record.bits if base is not None else None))

    def note(self, fence: Fence | None) -> Rewrite | None:
        note = Rewrite(self.version.id, self.catalog.clock.token(), self.catalog.now())

        def add(root: Root) -> Root:
            if note in root.rewrites or not self.goal.allows(root, self.version.entry):
                return root
            return replace(root, rewrites=(*root.rewrites, note))

        return note if note in self.catalog.register.update(add, Claims(fence)).rewrites else None

    def _swap(self, note: Rewrite, new: Entry, now: float, fence: Fence | None) -> bool:
        old, base = self.version.entry, self.rewriting.base
        read = frozenset({old} if base is None else {old, base.entry})

        def swap(root: Root) -> Root:
            if new in root.versions or not self.goal.allows(root, old):
                return root
            return replace(
                root,
                versions=tuple(new if entry == old else entry for entry in root.versions),
                dropped=(*root.dropped, Dropped(old.id, old.attempt, now)),
                rewrites=tuple(rewrite for rewrite in root.rewrites if rewrite != note),
            )

        try:
            return new in self.catalog.register.update(swap, Claims(fence, read=read)).versions
        except InvariantError as error:  # the root has changed since the plan was made
            log = about(logger, repository=self.catalog.uri, version=old.id)
            log.info("version %d stays as it is: %s", old.id, error)
            return False

    def _redelta_users(self, fence: Fence | None) -> None:
        for id in self.goal.users:
            entries = {entry.id: entry for entry in self.catalog.root().versions if not entry.resumable}
            if not {id, self.version.id} <= entries.keys() or entries[id].bases:
                continue
            try:
                plan(self.catalog, entries[id], redelta(entries[self.version.id])).execute(fence)
            except Damaged as error:
                log = about(logger, repository=self.catalog.uri, version=id)
                log.warning("version %d stays whole, and is no delta to version %d: %s", id, self.version.id, error)


def plan(catalog: Catalog, entry: Entry, goal: Goal, *, siblings: Sequence[Entry] = ()) -> Replacement:
    """Plan one replacement. Reads the version's record and manifest.

    With a signing key, what takes the version's place is signed, so the version and its bases must be signed with a key of this
    process: see ``Catalog.trusting``. Without one, the version must not be signed. Else ``Untrusted``.
    """
    signer = key_files.signer()
    catalog.admit(signer)
    catalog = catalog.trusting(signer)
    version = catalog.at(entry, siblings=siblings)
    base = catalog.at(goal.base, siblings=siblings) if goal.base is not None else None
    if signer is None:
        _check_unsigned(catalog, version)
    if entry.origin != (version.record.saved or entry.attempt):  # the root is not signed, and the new record repeats it
        what = f"the root says that attempt {entry.origin} was saved, the record does not"
        raise Damaged(what, subject=version.record_key)
    if not goal.recode and len(bases := version.record.bases) == 1:
        base = version.bases.version(bases[0])
    rewriting = rewrite.plan(version, base, weights_only=goal.weights_only, recode=goal.recode, bits=goal.bits)
    return Replacement(catalog, version, goal, rewriting, signer)


def _check_unsigned(catalog: Catalog, version: Version) -> None:
    """Raise ``Untrusted`` if a version is signed: what takes its place would not be."""
    key = keys.signature(version.id, version.attempt)
    with contextlib.suppress(NotFound):
        catalog.store.get(key, max_bytes=MAX_SIGNATURE)
        remedy = f"set {key_files.SIGNING_KEY} to the key that it was signed with"
        raise Untrusted(f"version {version.id} is signed, and no signing key is set here", subject=key, remedy=remedy)
