"""Copies versions into another store, which becomes or is a replica: a repository with the same id, whose versions keep theirs.

A replica is saved to by copies only. Its root names a copy as owner; once a training has saved there, copies refuse to go on,
because ids would then mean different versions. Versions are added as commits add them: in the order of ids, each by one swap of
the root, with the version's objects complete before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..arguments import integer, refused
from ..checks.verify import verify_sizes
from ..commit.catalog import Catalog
from ..commit.leases import Lease
from ..commit.rollback import rollback as roll_back
from ..errors import StateError
from ..format import key_files
from ..format.root import Entry, Root, Segment
from ..format.signature import Signer
from ..repository import Repository, create_repository, open_repository
from ..root.delta_chain import needed
from ..root.invariants import Claims, Fence
from ..runtime.clock import SYSTEM, Clock
from ..versions.version import Version
from ..versions.version_selector import VersionSelector, select
from .segments import copy_segment
from .transfer import MEMORY, copy_objects

_OWNER = "copy-"
_OWNERS = (_OWNER, "repair-")
_EMPTY = "copy to an empty folder or prefix"


@dataclass(frozen=True)
class CopyPlan:
    """What is copied. ``source_root``, ``root``: of both repositories when the plan was made. ``due``: the versions to copy, and
    their bases, oldest first. ``older``: ids of live versions that can be added no more, since the replica is past their ids.
    ``rollback``: the id of the version to make the newest again at the replica, because the source was rolled back; else 0.
    ``segments``: of the step journal, if the newest version of both is the same after the copy."""

    source: Repository
    replica: Repository
    source_root: Root
    root: Root
    due: tuple[Entry, ...]
    older: tuple[int, ...] = ()
    rollback: int = 0
    segments: tuple[Segment, ...] = ()
    signer: Signer | None = None
    memory: int = MEMORY

    @property
    def stored(self) -> int:
        """Bytes in packs and entries to copy."""
        return sum(entry.stored for entry in self.due) + sum(segment.stored for segment in self.segments)

    def execute(self, progress: Callable[[int], None] = lambda nbytes: None) -> list[Version]:
        """Copy the versions, then the segments, and add each to the replica's root.

        Args:
            progress: Called with the bytes of each object that is at the replica.

        Returns:
            The versions of the replica that were added, oldest first.

        Raises:
            Damaged: Names the object of the source; its version is not added, those before it are.
            NotFound: A version was dropped meanwhile.
            Fenced: A training has saved to the replica meanwhile.
            StoreError: A store failed.
        """
        if self.rollback:
            roll_back(self.replica, self.replica.version(self.rollback), self._claims)
        copied = [self._copy(entry, progress) for entry in self.due]
        for segment in self.segments:
            if not copy_segment(self.source, self.replica, segment, self._claims, signer=self.signer, progress=progress):
                break  # a version has replaced it: the next copy brings that
        return copied

    @property
    def _claims(self) -> Claims:
        return Claims(Fence(self.root.epoch, self.root.owner))

    def _copy(self, entry: Entry, progress: Callable[[int], None]) -> Version:
        version = self.source.at(entry, siblings=self.source_root.listed)

        def add(root: Root) -> Root:
            if entry in root.listed:
                return root  # done before; the answer was lost
            return root.with_version(entry)

        with Lease(self.replica.store, entry.id, entry.attempt, self.replica.clock):  # on objects of an earlier, interrupted copy
            with self.source.lease(version):
                _check_bases(version, self.source_root, self.replica)
                copy_objects(version, self.replica.store, memory=self.memory, signer=self.signer, progress=progress)
            copied = self.replica.at(entry, siblings=self.replica.root().listed)
            verify_sizes(copied)  # with its bases and its signature, as readers there see them
            self.replica.register.update(add, self._claims)
        return copied


def plan_copy(
    source_uri: str,
    uri: str,
    versions: Iterable[VersionSelector] | None = None,
    *,
    sign: bool = False,
    memory: int = MEMORY,
    clock: Clock = SYSTEM,
) -> CopyPlan:
    """Plan a copy. Creates the replica if there is nothing at ``uri``.

    Args:
        source_uri: The repository to copy from.
        uri: The replica, or where to create it.
        versions: The versions to copy; their bases are copied, too. None: all live ones that are newer than the
            replica's.
        sign: Whether to sign the copies with the key that ``RAYSTOW_SIGNING_KEY`` names; else signatures are kept. The source
            must be signed with one of this process's trusted keys, or without these with the signing key.
        memory: Bytes of packs in memory at a time.
        clock: The time.

    Returns:
        The plan.

    Raises:
        StateError: ``uri`` is another repository or was saved to by a training; a version is rolled back, or older than what the
            replica has seen; or there is no key to sign with.
        NotARepository: There is none at ``source_uri``.
        NotFound: There is no such version.
    """
    integer("memory", memory, least=1)
    if isinstance(versions, str) or not isinstance(versions, Iterable | None):  # a string would be taken by its characters
        raise refused("versions", versions, 'a list of versions, such as [7] or ["best"]')
    signer = _signer() if sign else None
    source = open_repository(source_uri, clock=clock).trusting(signer)
    source_root = source.root()
    chosen = None if versions is None else _chosen(source, source_root, versions)
    replica = _replica(source, source_root, uri, signer, clock)
    root = replica.root()
    present = {entry.id: entry for entry in root.listed}
    _check_same(source_root, present, replica)
    due = tuple(entry for entry in (source_root.versions if chosen is None else chosen) if entry.id not in present)
    older = tuple(entry.id for entry in due if entry.id < root.next_id)
    if chosen and older:
        what = f"version {older[0]} is older than what was copied here: versions are added in the order of their ids"
        raise StateError(what, subject=replica.uri, remedy=_EMPTY)
    due = tuple(entry for entry in due if entry.id >= root.next_id)
    rollback = 0 if chosen is not None else _rollback(source_root, root)
    segments = () if chosen == () else _segments(source_root, root, due[-1].id if due else rollback)
    return CopyPlan(source, replica, source_root, root, due, older, rollback, segments, signer, memory)


def _chosen(source: Catalog, root: Root, versions: Iterable[VersionSelector]) -> tuple[Entry, ...]:
    """The entries to copy with their bases, ids ascending."""
    chosen = [select(root, which, source.uri) for which in versions]
    live = set(root.versions)
    for entry in chosen:
        if entry not in live:
            remedy = "only live versions are copied; `raystow restore` or `raystow export` writes its tensors to files"
            raise StateError(f"version {entry.id} is rolled back", subject=source.uri, remedy=remedy)
    ids = {entry.id for entry in chosen}
    users = needed(root.listed, ids)
    return tuple(entry for entry in root.listed if entry.id in ids or entry.id in users)


def _signer() -> Signer:
    signer = key_files.signer()
    if signer is None:
        remedy = f"let {key_files.SIGNING_KEY} name a private key; `raystow keygen FILE` makes one"
        raise StateError("no signing key is set here", subject="--sign", remedy=remedy)
    return signer


def _replica(source: Repository, root: Root, uri: str, signer: Signer | None, clock: Clock) -> Repository:
    owner = f"{_OWNER}{clock.token()}"
    first = Root(repository=source.id, epoch=root.epoch, owner=owner, rollbacks=root.rollbacks)
    signed_by = source.signed_by if signer is None else (signer.public,)
    replica = create_repository(uri, clock=clock, first=first, signed_by=signed_by)
    if replica.store.uri == source.store.uri:
        raise StateError("source and destination are the same", subject=source.uri, remedy=_EMPTY)
    if replica.id != source.id:
        raise StateError("the destination is another repository", subject=replica.uri, remedy=_EMPTY)
    owner = replica.root().owner
    if not owner.startswith(_OWNERS):
        what = f"it is no replica, or none any more: {owner or 'somebody else'} has saved there"
        raise StateError(what, subject=replica.uri, remedy=_EMPTY)
    if signer is not None:
        replica.admit(signer)
    return replica.trusting(signer)


def _check_same(source_root: Root, present: dict[int, Entry], replica: Catalog) -> None:
    for entry in source_root.listed:
        other = present.get(entry.id)
        if other is not None and other.origin != entry.origin:
            raise StateError(f"its version {entry.id} is not that of the source", subject=replica.uri, remedy=_EMPTY)


def _rollback(source_root: Root, root: Root) -> int:
    """The id of the version that a rollback at the source makes the newest one at the replica, too; 0 if there was none."""
    live, listed = [entry.id for entry in source_root.versions], {entry.id for entry in root.listed}
    target = max((id for id in live if id in listed), default=0)
    if not target or not root.versions:
        return 0
    newest = root.versions[-1].id
    gone = {one.entry.id for one in source_root.rolled_back}
    # Retention drops rolled-back versions, too: then a newest one that the source does not list is taken for one of them.
    dropped = newest > target and source_root.rollbacks > root.rollbacks
    lost = newest in gone or newest > live[-1] or dropped
    old_steps = newest == live[-1] and not set(root.segments) <= set(source_root.segments)
    return target if lost or old_steps or target not in {entry.id for entry in root.versions} else 0


def _segments(source_root: Root, root: Root, newest: int) -> tuple[Segment, ...]:
    """The segments to copy: none unless the newest version is the same. ``newest``: its id at the replica, if that changes."""
    there = newest or max((entry.id for entry in root.versions), default=0)
    same = there == max((entry.id for entry in source_root.versions), default=0)
    return tuple(one for one in source_root.segments if one.number >= root.next_segment) if same else ()


def _check_bases(version: Version, source_root: Root, replica: Catalog) -> None:
    """Check that the replica has the bases of a version, with the mantissa bits that they had when the version was made."""
    there = {entry.id: entry for entry in replica.root().listed}
    for entry in source_root.listed:
        if entry.id not in version.entry.bases:
            continue
        if entry.id not in there:
            what = f"version {version.id} is a delta to version {entry.id}, which was dropped there"
            raise StateError(what, subject=replica.uri, remedy=f"`raystow compact URI {version.id}` at the source, or {_EMPTY}")
        if there[entry.id] != entry and replica.at(there[entry.id]).record.bits != version.record.base_bits:
            what = f"version {version.id} is a delta to version {entry.id} as it was rounded since"
            raise StateError(what, subject=replica.uri, remedy=_EMPTY)
