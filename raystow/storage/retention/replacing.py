"""Replacing: a version keeps its id, and another attempt takes the place of the one that it was.

The version is written once more, and one swap of the root puts the new attempt in the place of the old, which is dropped then
like any other: who reads it has the grace period, or a lease, to finish. Why no moment has neither:

- The new attempt is noted in the root (``rewrites``) before anything of it is written. A collection leaves what is noted alone,
  or, if it was not written to for the grace period, strikes the note out first.
- The swap asks for the note, and for the old attempt, on the very root that it replaces. However late it comes, without a note it
  is not made, and the version stays as it was.
- It asks for the attempt, too, that what was written is a difference to: another who thins may have rounded that version since it
  was read.

A replacement that dies leaves an attempt that is no version, for a collection to find.
"""

from __future__ import annotations

import abc
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .. import leases, store_clock
from ..chains import sound
from ..committer import put_record
from ..errors import NotFound, Untrusted
from ..format import key_files, keys
from ..format.root import Dropped, Entry, Rewrite, Root
from ..format.signing import Signer, Trust
from ..format.version_record import VersionRecord
from ..log import about
from ..version import Version
from .rewriting import Progress, Rewriting

if TYPE_CHECKING:
    from ..repository import Repository

logger = logging.getLogger(__name__)

Check = Callable[[Root], None]


@dataclass(frozen=True)
class Replacement(abc.ABC):
    """One version, and what is to be written in its place. ``signer``: who signs it anew, None if it was not signed."""

    repository: Repository
    version: Version
    rewriting: Rewriting
    signer: Signer | None

    @property
    @abc.abstractmethod
    def needed(self) -> bool:
        """Whether it would be another than it is."""

    @property
    def stored(self) -> int:
        """About how many stored bytes come of it."""
        return self.rewriting.stored

    def execute(self, check: Check = lambda root: None, progress: Progress = lambda nbytes: None) -> Entry | None:
        """The root's new entry; or None if the version stays as it is, since it was dropped, leased or replaced meanwhile, or
        must stay for what else has happened. ``progress``: see ``Rewriting``.

        ``check`` may raise to give up on the root that is to be replaced. Raises what reading and the store raise; then the
        version is as it was, unless the store gave no answer in time to the swap.
        """
        old, repository = self.version, self.repository
        note = self._noted(check)
        if note is None:
            return None
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self._leased())
            except NotFound:
                return None
            fragments, packs = self.rewriting.execute(note.attempt, progress)
        now = store_clock.now(repository.store, repository.clock)
        record = replace(old.record, attempt=note.attempt, saved=old.entry.origin, fragments=fragments, packs=packs)
        record = self._leaning(self._changed(record, now))
        new, _ = put_record(repository.store, record, self.signer)
        if (old.id, old.attempt) in leases.held(repository.store, now) or not self._swapped(note, new, now, check):
            return None
        whose = {"version": new.id, "attempt": new.attempt, "step": new.step}
        log = about(logger, repository=repository.uri, **whose)
        log.info("version %d, step %d, %s: %d bytes are %d", new.id, new.step, self._done(), old.bytes, new.stored)
        return new

    @abc.abstractmethod
    def _may(self, root: Root) -> bool:
        """Whether this root allows it; a root that does not hold the version never does."""

    @abc.abstractmethod
    def _done(self) -> str:
        """What has become of the version, for the log."""

    def _changed(self, record: VersionRecord, now: float) -> VersionRecord:
        """What the record says of it."""
        return record

    def _leaning(self, record: VersionRecord) -> VersionRecord:
        """What the record says of what it is a difference to."""
        if record.thinned is None:
            return record
        base = self.rewriting.base
        return replace(record, thinned=replace(record.thinned, base_bits=base.record.bits if base is not None else None))

    @contextlib.contextmanager
    def _leased(self) -> Iterator[None]:
        """Leases on all that is read: the version, what it is a difference to, and what it is to be one to."""
        base = self.rewriting.base
        with contextlib.ExitStack() as held:
            held.enter_context(self.repository.lease(self.version))
            if base is not None and base.id not in self.version.entry.bases:
                held.enter_context(self.repository.lease(base))
            yield

    def _noted(self, check: Check) -> Rewrite | None:
        note = Rewrite(
            self.version.id, self.repository.clock.token(), store_clock.now(self.repository.store, self.repository.clock)
        )

        def add(root: Root) -> Root:
            if note in root.rewrites or self.version.entry not in root.versions or not self._may(root):
                return root
            check(root)
            return replace(root, rewrites=(*root.rewrites, note))

        return note if note in self.repository.register.update(add).rewrites else None

    def _swapped(self, note: Rewrite, new: Entry, now: float, check: Check) -> bool:
        old = self.version.entry
        read = {old} if self.rewriting.base is None else {old, self.rewriting.base.entry}

        def swap(root: Root) -> Root:
            if new in root.versions or note not in root.rewrites or not read.issubset(root.versions) or not self._may(root):
                return root
            versions = tuple(new if entry == old else entry for entry in root.versions)
            if not sound(versions, new):  # what it was to be a difference to has become one itself
                return root
            check(root)
            return replace(
                root,
                versions=versions,
                dropped=(*root.dropped, Dropped(old.id, old.attempt, now)),
                rewrites=tuple(rewrite for rewrite in root.rewrites if rewrite != note),
            )

        return new in self.repository.register.update(swap).versions


def signer(repository: Repository, version: Version) -> Signer | None:
    """Who signs what takes the place of a version: what was signed stays so, by a key with which versions are read here; nothing
    else becomes so. ``Untrusted`` if it is signed, or should be, and nobody here can sign."""
    signer, trusts = key_files.signer(), [Trust(repository.signed_by), repository.trust]
    if any(trust.keys for trust in trusts):  # and then the version was read because of its signature
        for trust in trusts:
            trust.admit(signer)
        return signer
    key = keys.signature(version.id, version.attempt)
    if not any(info.key == key for info in repository.store.list(key)):
        return None
    if signer is None:
        remedy = f"let {key_files.SIGNING_KEY} name the key that it was signed with"
        raise Untrusted(f"version {version.id} is signed, and no signing key is set here", subject=key, remedy=remedy)
    Trust((signer.public,)).check(
        repository.store, repository.id, version.id, version.attempt, bytes.fromhex(version.entry.digest)
    )
    return signer
