"""A repository: the checkpoints of one run under one URI."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from .arguments import refused
from .checks.probe import probe_conditional_writes
from .checks.verify import Verified, verify_bytes, verify_sizes
from .checks.verify_progress import VerifyJournal
from .commit import rollback
from .commit.catalog import Catalog
from .errors import Damaged, NotARepository, NotFound, PreconditionFailed, RaystowError, StateError
from .format import key_files, keys
from .format.marker import Marker
from .format.root import REPAIR, Root
from .format.signature import VERSION, PublicKey, RecordKind, Signer, Trust
from .limits import MAX_MARKER, MAX_ROOT
from .notebook import facts_table, moment, rows_table, size
from .object_store import ObjectStore
from .retention import collect
from .retention import plan as retention
from .retention.collect import CollectionPlan
from .retention.plan import CompactionPlan, RetentionPlan
from .retention.policy import Policy
from .root.delta_chain import dependents
from .root.seen_roots import SEEN_ROOTS
from .runtime.clock import SYSTEM, Clock
from .stores import open_store
from .versions.version import Version
from .versions.version_selector import VersionSelector, check_version, is_reserved, select

_SHOWN = 20  # versions in a notebook


class Repository(Catalog):
    """A repository: lists, opens, verifies and pins versions, and plans what is kept.

    Listing and reading take no lock, and need neither Ray nor a GPU: a version never changes.
    """

    def __repr__(self) -> str:
        return f"Repository({self.uri!r})"

    def _repr_html_(self) -> str:
        try:
            versions = self.versions()
        except RaystowError as error:
            return facts_table(self.uri, {"problem": error})
        shown = f"{len(versions)} versions" + (f", the newest {_SHOWN}" if len(versions) > _SHOWN else "")
        rows = ([one.id, one.step, moment(one.created), size(one.raw), size(one.bytes)] for one in versions[-_SHOWN:])
        return rows_table(f"{self.uri}: {shown}", ["id", "step", "created", "raw", "stored"], rows)

    def versions(self) -> list[Version]:
        """List the versions, with one request to the store. Rolled-back ones are not among them.

        Returns:
            The versions, oldest first.
        """
        root = self.root()
        return [self.at(entry, siblings=root.listed) for entry in root.versions]

    def rolled_back(self) -> list[Version]:
        """List the rolled-back versions, with one request to the store.

        Returns:
            The versions, oldest first.
        """
        root = self.root()
        return [self.at(one.entry, siblings=root.listed) for one in root.rolled_back]

    def latest(self) -> Version | None:
        """Open the newest version.

        Returns:
            The version, or None if there is none.
        """
        entries = self.root().versions
        return self.at(entries[-1], siblings=entries) if entries else None

    def version(self, which: VersionSelector) -> Version:
        """Open a version.

        Args:
            which: The id of a version, the name of a pin, ``"step:60"`` (the newest version of that step), ``"latest"``, or a
                ``Version``, whose present state is returned. Ids, pins and ``Version`` objects also find rolled-back versions.

        Returns:
            The version.

        Raises:
            NotFound: There is no such version.
            StateError: ``which`` is none of these.
        """
        root = self.root()
        return self.at(select(root, which, self.uri), siblings=root.listed)

    def verify(
        self,
        version: Version,
        progress: Callable[[int], None] = lambda nbytes: None,
        *,
        deep: bool = True,
        journal: VerifyJournal | None = None,
    ) -> Verified:
        """Check a version against its digests. Takes memory for the manifest and up to 512 MiB of chunks.

        Args:
            version: The version.
            progress: Called with the decoded bytes of each chunk.
            deep: Read every byte. Else record and manifest are checked by their digests, packs by their sizes.
            journal: Packs in it are not read again; those that are read are added.

        Returns:
            The numbers of objects and bytes that were checked.

        Raises:
            Damaged: Names the first object that is wrong.
            StateError: The version is of another repository.
        """
        check_version(version, self.id)
        fresh = self.at(version.entry, siblings=version.siblings)  # what the caller's has cached may be damaged by now
        return verify_bytes(fresh, progress, journal=journal) if deep else verify_sizes(fresh)

    def rollback(self, which: VersionSelector) -> list[Version]:
        """Make a version the newest again, with one swap of the root. Nothing is deleted.

        The version and those that it continues are live afterwards. All others are rolled back: they stay listed until retention
        drops them, and ``restore_latest`` never chooses them. Saves that began before fail; those that begin later are newer than
        every version. A rollback to a rolled-back version makes it live again: this undoes a rollback.

        Args:
            which: The version, live or rolled back; see ``version``.

        Returns:
            The versions that it rolled back, oldest first.

        Raises:
            NotFound: There is no such version.
        """
        return rollback.rollback(self, self.version(which))

    def pin(self, version: Version, name: str, *, move: bool = True) -> None:
        """Give a version a name under which retention keeps it. A name has one version: the one pinned last.

        Args:
            version: The version.
            name: The name.
            move: Whether the name may be taken from another version.

        Raises:
            StateError: The version was dropped or is of another repository, another one has the name, or the name is a number,
                ``latest`` or begins with ``step:``.
        """
        if not isinstance(name, str) or not name or is_reserved(name):
            raise refused("name", name, "a name that is no number, not 'latest', and does not begin with 'step:'")
        check_version(version, self.id)

        def change(root: Root) -> Root:
            if all(entry.id != version.id for entry in root.listed):
                remedy = "`raystow ls` lists the versions"
                raise StateError(f"there is no version {version.id} to pin", subject=self.uri, remedy=remedy)
            if not move and (held := root.pins.get(name, version.id)) != version.id:
                raise StateError(f"{name!r} is version {held}", subject=self.uri, remedy="--move moves the name")
            return root if root.pins.get(name) == version.id else replace(root, pins={**root.pins, name: version.id})

        self.register.update(change)

    def unpin(self, name: str) -> None:
        """Remove a pin, if there is one of this name.

        Args:
            name: The name of the pin.

        Raises:
            StateError: The name is no text.
        """
        if not isinstance(name, str):
            raise refused("name", name, "the name of a pin")

        def change(root: Root) -> Root:
            return replace(root, pins={k: v for k, v in root.pins.items() if k != name}) if name in root.pins else root

        self.register.update(change)

    def record_verified(self, *whole: Version, damaged: Collection[Version] = ()) -> int:
        """Note the newest version that a deep verification found whole, so that retention keeps it; the id that is noted, or 0.

        ``whole``: versions found whole. A newer one that is noted already stays noted. ``damaged``: those found damaged. If the
        noted one is among them, or needs one of them, it is noted no more.
        """

        def change(root: Root) -> Root:
            found = {version.entry for version in whole}
            newest = max((entry.id for entry in root.versions if entry in found), default=0)
            broken = [version.id for version in damaged if version.entry in root.versions]
            lost = {id for one in broken for id in (one, *dependents(root.versions, one))}
            verified = newest if root.verified in lost else max(newest, root.verified)
            return root if verified == root.verified else replace(root, verified=verified)

        return self.register.update(change).verified

    def plan_retention(
        self,
        policy: Policy,
        *,
        known: dict[str, dict[str, object]] | None = None,
        bases: Collection[int] = (),
        compact: bool = False,
    ) -> RetentionPlan:
        """Plan what a policy keeps, thins and drops. Changes nothing before ``execute()`` is called.

        Reads the root, the leases and, if the policy has ``keep_best``, every version's record.

        Args:
            policy: The rules.
            known: Metrics by attempt that need not be read; those that are read are added.
            bases: Ids of the versions that saves under way may be deltas to.
            compact: Write deltas whole where that frees more bytes than it writes.

        Returns:
            The plan.
        """
        return retention.plan_policy(self, policy, known=known, bases=bases, compact=compact)

    def plan_release(self, names: Collection[str]) -> RetentionPlan:
        """Plan to drop, with their pins, the versions that only the pins of these names keep.

        Pins of versions that stay for another reason stay, too. Changes nothing before ``execute()`` is called.
        """
        return retention.plan_release(self, names)

    def plan_compaction(self, ids: Collection[int] | None = None) -> CompactionPlan:
        """Plan which deltas are written whole, so that their bases may be dropped.

        Changes nothing before ``execute()`` is called.

        Args:
            ids: Ids of the versions; None for all.

        Returns:
            The plan.

        Raises:
            StateError: There is no version of an id.
        """
        return retention.plan_compaction(self, ids)

    def plan_collection(
        self,
        *,
        grace: float = collect.GRACE,
        dropped_only: bool = False,
        progress: Callable[[int], None] = lambda objects: None,
    ) -> CollectionPlan:
        """Plan the deletion of objects that belong to no version. Changes nothing before ``execute()`` is called.

        Args:
            grace: Seconds for which dropped versions and idle attempts are left alone. With 0, a save under way may fail.
            dropped_only: Do not look for objects of failed attempts, which takes a listing of all objects.
            progress: Called with the number of objects that were listed, many at a time.

        Returns:
            The plan.

        Raises:
            StateError: ``grace`` is invalid.
            Damaged: The root is damaged, so garbage cannot be distinguished from versions.
        """
        return collect.plan(self, grace=grace, dropped_only=dropped_only, progress=progress)


def open_repository(
    uri: str | ObjectStore, *, clock: Clock = SYSTEM, trusted_keys: str | os.PathLike[str] | None = None
) -> Repository:
    """Open a repository for reading, at an address or in its store. Raises ``NotARepository`` if there is none, and ``Damaged``
    if marker or root are lost.

    ``trusted_keys``: only versions signed with one of these are read; see ``key_files.trust``. By default the keys that the
    environment names, else those that the repository names; if there are none, signatures are not required.
    """
    store, trust = open_store(uri) if isinstance(uri, str) else uri, key_files.trust(trusted_keys)
    try:
        marker = Marker.load(store.get(keys.MARKER, max_bytes=MAX_MARKER))
    except Damaged as error:
        raise Damaged(error.what, subject=error.subject, remedy=REPAIR) from error
    except NotFound:
        _refuse_lost_marker(store)
        if next(iter(store.list("")), None) is None:
            remedy = "check the path; the first save makes one"
            raise NotARepository("there is no repository here", subject=store.uri, remedy=remedy) from None
        what = f"there are objects here, but no {keys.MARKER}"
        raise NotARepository(what, subject=store.uri, remedy="check the path") from None
    return Repository(store, marker.repository, clock=clock, trust=trust, signed_by=marker.signed_by)


def latest_version(uri: str, *, trusted_keys: str | os.PathLike[str] | None = None) -> Version | None:
    """Open the newest version as ``open_repository(uri).latest()`` does, with one read: of the root.

    The marker is read when the version's record is, and compared with the root then.
    """
    if SEEN_ROOTS in os.environ:  # the root is compared with what was seen of the marker's repository
        return open_repository(uri, trusted_keys=trusted_keys).latest()
    store = open_store(uri)
    try:
        root = Root.load(store.get(keys.ROOT, max_bytes=MAX_ROOT))
    except (NotFound, Damaged):
        return open_repository(uri, trusted_keys=trusted_keys).latest()
    trust = _TrustOfMarker(uri=store.uri, trusted_keys=trusted_keys)
    return Version(store, root.versions[-1], root.repository, trust, root.versions) if root.versions else None


@dataclass(frozen=True, kw_only=True)
class _TrustOfMarker(Trust):
    """The trust of a repository that is opened when a version is first checked."""

    uri: str
    trusted_keys: str | os.PathLike[str] | None

    def check(
        self, store: ObjectStore, repository: str, id: int, attempt: str, digest: bytes, kind: RecordKind = VERSION
    ) -> None:
        """As ``Trust.check``. Raises ``Damaged`` if the marker is of another repository."""
        opened = open_repository(self.uri, trusted_keys=self.trusted_keys)
        if opened.id != repository:
            what = f"belongs to repository {opened.id}, but {keys.ROOT} to {repository}"
            raise Damaged(what, subject=keys.MARKER, remedy=REPAIR)
        opened.trust.check(store, repository, id, attempt, digest, kind)


def create_repository(
    uri: str | ObjectStore,
    *,
    clock: Clock = SYSTEM,
    signer: Signer | None = None,
    first: Root | None = None,
    signed_by: tuple[PublicKey, ...] = (),
    abandoned: Collection[tuple[int, str]] = (),
) -> Repository:
    """Open a repository, and create it if there is none. Several callers at once get the same one.

    ``signer``: a new repository requires signatures by its key, or by one that this process trusts; see ``Catalog.trusting``
    for what it reads. ``first``: the root of a new
    repository that is a copy of another, which requires signatures by ``signed_by``. ``abandoned``: attempts of a deleted
    repository that never were versions, whose objects may be there. Raises ``UnsafeStore`` if the
    store, which is probed before its first use, lets two conditional writes win.
    """
    store = open_store(uri) if isinstance(uri, str) else uri
    try:
        store.get(keys.MARKER, max_bytes=MAX_MARKER)
    except NotFound:
        _refuse_lost_marker(store, abandoned)
        probe_conditional_writes(store, clock)
        id = first.repository if first is not None else clock.token() + clock.token()
        marker = Marker(id, clock.now(), signed_by or _signed_by(signer))
        try:
            store.put_if(keys.MARKER, marker.dump(), None)
        except PreconditionFailed:
            pass  # another creator was faster: its marker counts
    repository = open_repository(store, clock=clock)
    try:
        repository.register.read()
    except NotFound:
        repository.register.read_or_empty(abandoned)  # raises if a root was lost; else a creator died between marker and root
        copied = first is not None and first.repository == repository.id
        repository.register.create(first if first is not None and copied else Root(repository=repository.id))
    return repository.trusting(signer)


def _refuse_lost_marker(store: ObjectStore, abandoned: Collection[tuple[int, str]] = ()) -> None:
    """Raise ``Damaged`` if there is a repository without a marker: none may be created over it. ``abandoned``: see
    ``create_repository``."""
    found = any(info.key == keys.ROOT for info in store.list(keys.ROOT))
    attempts = (keys.attempt_of(info.key) for info in store.list(keys.VERSIONS))
    found = found or any(attempt is not None and attempt not in abandoned for attempt in attempts)
    # Listed again: another creator may have written it meanwhile, and the root after it.
    if found and not any(info.key == keys.MARKER for info in store.list(keys.MARKER)):
        raise Damaged("the repository's marker is missing", subject=keys.MARKER, remedy=REPAIR) from None


def _signed_by(signer: Signer | None) -> tuple[PublicKey, ...]:
    """The keys for a new marker. Raises ``Untrusted`` if this process would not read what ``signer`` signs."""
    trust = key_files.trust() or Trust()
    trust.admit(signer)
    return tuple(dict.fromkeys((signer.public, *trust.keys))) if signer is not None else ()
