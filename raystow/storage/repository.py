"""A repository: one run's checkpoints under one URI. Opening, listing, reading, pinning."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from . import leases, store_clock
from .arguments import refused
from .chains import dependents, needed
from .clock import SYSTEM, Clock
from .errors import Damaged, NotARepository, NotFound, PreconditionFailed, StateError
from .format import key_files, keys, records
from .format.root import REPAIR, Entry, Register, Root
from .format.signing import PublicKey, Signer, Trust, dump_keys, load_keys
from .journal import Journal
from .limits import MAX_MARKER, MAX_ROOT
from .object_store import ObjectStore
from .probe import probe_conditional_writes
from .retention import collect, compaction
from .retention import policy as retention
from .retention.collect import CollectionPlan
from .retention.compaction import CompactionPlan
from .retention.plan import RetentionPlan
from .stores import open_store
from .verify import Verified, verify_bytes, verify_sizes
from .version import Version

_RECORDS_AT_ONCE = 16


class Repository:
    """A repository that exists. Listing and reading need no Ray, no GPU and no lock: a version never changes.

    ``trust``: who must have signed the versions that are read. ``signed_by``: the keys that the repository itself asks for.
    """

    def __init__(
        self,
        store: ObjectStore,
        id: str,
        *,
        clock: Clock = SYSTEM,
        trust: Trust | None = None,
        signed_by: tuple[PublicKey, ...] = (),
    ) -> None:
        self.store, self.id, self.clock = store, id, clock
        self.trust, self.signed_by = trust or Trust(signed_by), signed_by
        self.register = Register(store, clock, repository=id)

    @property
    def uri(self) -> str:
        """The address it was opened with."""
        return self.store.uri

    def __repr__(self) -> str:
        return f"Repository({self.uri!r})"

    def root(self) -> Root:
        """The root as it is now, checked to be this repository's."""
        try:
            return self.register.read()
        except NotFound:
            raise Damaged("the repository's root is missing", subject=keys.ROOT, remedy=REPAIR) from None

    def versions(self) -> list[Version]:
        """Every committed version, oldest first. One read."""
        entries = self.root().versions
        return [self.at(entry, beside=entries) for entry in entries]

    def at(self, entry: Entry, *, store: ObjectStore | None = None, beside: Sequence[Entry] = ()) -> Version:
        """The version that an entry of the root names; read through another ``store``, if one is given. ``beside``: see
        ``Version``."""
        return Version(store or self.store, entry, self.id, self.trust, beside)

    def latest(self) -> Version | None:
        """The newest version, or None if there is none yet."""
        entries = self.root().versions
        return self.at(entries[-1], beside=entries) if entries else None

    def version(self, id: int) -> Version:
        """The version with this id."""
        for version in self.versions():
            if version.id == id:
                return version
        raise StateError(f"there is no version {id}", subject=self.uri, remedy="`raystow ls` lists what there is")

    def verify(
        self,
        version: Version,
        progress: Callable[[int], None] = lambda nbytes: None,
        *,
        deep: bool = True,
        journal: Journal | None = None,
    ) -> Verified:
        """Read every byte of a version and hold it against its digests; ``Damaged`` names the first object found wrong.

        ``progress`` is told the decoded bytes of each chunk. Packs in the ``journal`` are not read again; those read are added.
        With ``deep=False`` no pack is read: record and manifest are checked by their digests, packs by their sizes.
        Memory: the manifest and up to 512 MiB of chunks under way.
        """
        fresh = self.at(version.entry, beside=version.beside)  # what the caller's has read before may have been damaged since
        return verify_bytes(fresh, self.store, progress, journal=journal) if deep else verify_sizes(fresh, self.store)

    def orphans(self) -> list[str]:
        """Keys of objects that belong to no live version: of dropped ones, and of attempts that failed or are under way."""
        live = {(entry.id, entry.attempt) for entry in self.root().versions}
        return [info.key for info in self.store.list(keys.VERSIONS) if keys.attempt_of(info.key) not in live]

    def pin(self, version: Version, name: str, *, move: bool = True) -> None:
        """Give a version a name under which it is kept for good. A name holds one version: the last one pinned to it.

        ``move=False``: ``StateError`` if the name holds another version already.
        """

        def change(root: Root) -> Root:
            if all(entry.id != version.id for entry in root.versions):
                remedy = "`raystow ls` lists what there is"
                raise StateError(f"there is no version {version.id} to pin", subject=self.uri, remedy=remedy)
            if not move and (held := root.pins.get(name, version.id)) != version.id:
                raise StateError(f"{name!r} is version {held}", subject=self.uri, remedy="--move lets it go and moves the name")
            return root if root.pins.get(name) == version.id else replace(root, pins={**root.pins, name: version.id})

        self.register.update(change)

    def unpin(self, name: str) -> None:
        """Drop a pin; none of that name is no error."""

        def change(root: Root) -> Root:
            return replace(root, pins={k: v for k, v in root.pins.items() if k != name}) if name in root.pins else root

        self.register.update(change)

    @contextlib.contextmanager
    def lease(self, version: Version) -> Iterator[None]:
        """Keep the objects of a version, and of what it is a difference to, in the store while it is read, even if it is dropped
        meanwhile. ``NotFound`` if it is gone."""
        wanted, leased = {version.entry}, set[Entry]()
        with contextlib.ExitStack() as held:
            while fresh := wanted - leased:  # each is looked for once more when its lease is written: then it is there to stay
                for entry in fresh:
                    held.enter_context(leases.Lease(self.store, entry.id, entry.attempt, self.clock))
                leased |= fresh
                versions = self.root().versions
                if version.entry not in versions:
                    raise NotFound(f"version {version.id} was dropped meanwhile", subject=self.uri, remedy="take a newer one")
                users = needed(versions, [version.id])
                wanted = {entry for entry in versions if entry.id in users}
            yield

    def record_verified(self, *whole: Version, damaged: Collection[Version] = ()) -> int:
        """Note the newest version that a deep verification found ``whole``, unless a newer one is noted: retention keeps it.

        If the noted one is among those that it found ``damaged``, or cannot be read without one of these, the newest whole one
        takes its place, or none does. The id that is noted afterwards, 0 for none.
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
        policy: retention.Policy,
        *,
        known: dict[str, dict[str, Any]] | None = None,
        bases: Collection[int] = (),
        compact: bool = False,
    ) -> RetentionPlan:
        """What ``policy`` keeps, thins and drops of the versions there are now; changes nothing before ``execute()`` is called.

        Reads the root, the leases and, if the policy has ``keep_best``, every version's record. ``known``: metrics by attempt
        that need not be read; those read are added to it. ``bases`` and ``compact``: see ``retention.policy.plan``.
        """
        root = self.root()
        metrics: dict[int, dict[str, Any]] = {}
        if policy.keep_best is not None:
            known = {} if known is None else known
            versions = [self.at(entry) for entry in root.versions if entry.attempt not in known]
            with ThreadPoolExecutor(_RECORDS_AT_ONCE) as pool:
                known.update(pool.map(lambda version: (version.attempt, version.metrics), versions))
            metrics = {entry.id: known[entry.attempt] for entry in root.versions}

        def decide(leased: Collection[tuple[int, str]]) -> tuple[retention.Decision, ...]:
            return retention.plan(
                root.versions,
                policy,
                pins=root.pins,
                metrics=metrics,
                verified=root.verified,
                leased=leased,
                bases=bases,
                compact=compact,
            )

        decisions = decide(())
        if any(decision.verdict != "keep" for decision in decisions):  # else nobody needs to know what time it is in the store
            decisions = decide(leases.held(self.store, store_clock.now(self.store, self.clock)))
        return RetentionPlan(self, decisions, policy=policy)

    def plan_release(self, names: Collection[str]) -> RetentionPlan:
        """What nothing keeps but the pins of these ``names``, to be dropped together with them; what anything else keeps stays,
        and so do its pins. Changes nothing before ``execute()`` is called."""
        root = self.root()
        released = frozenset(names)
        doomed = {id for name, id in root.pins.items() if name in released}
        leased = leases.held(self.store, store_clock.now(self.store, self.clock)) if doomed else set()
        held = {entry.id for entry in root.versions if entry.id not in doomed or (entry.id, entry.attempt) in leased}
        users = needed(root.versions, held)
        decisions = tuple(
            retention.Decision(entry, False, ("released",))
            if entry.id not in held and entry.id not in users
            else retention.Decision(entry, True, ("leased" if entry.id in doomed & held else "needed or not released",))
            for entry in root.versions
        )
        return RetentionPlan(self, decisions, released)

    def plan_compaction(self, ids: Collection[int] | None = None) -> CompactionPlan:
        """Which of the versions ``ids``, None for all, are differences and can be written whole, so that what they need now may
        be dropped; changes nothing before ``execute()`` is called. ``StateError`` for an id that is none."""
        root = self.root()
        return compaction.plan_of(self, root, ids, leases.held(self.store, store_clock.now(self.store, self.clock)))

    def plan_collection(self, *, grace: float = collect.GRACE, dropped_only: bool = False) -> CollectionPlan:
        """What lies in the store and belongs to no version; changes nothing before ``execute()`` is called.

        ``grace``: seconds that dropped versions and idle attempts are left alone; with 0, a save under way may fail. With
        ``dropped_only``, what failed attempts have left is not looked for: that takes a listing of everything.
        ``StateError`` if ``grace`` makes no sense; ``Damaged`` if the root is: without it nobody can tell what is garbage.
        """
        if not 0 <= grace < math.inf:
            raise refused("grace", grace, "seconds, 0 or more")
        self.root()
        look = collect.plan_dropped if dropped_only else collect.plan
        return look(self.store, self.register, self.clock, grace=grace)


def open_repository(uri: str, *, clock: Clock = SYSTEM, trusted_keys: str | os.PathLike[str] | None = None) -> Repository:
    """Open the repository at ``uri`` for reading; ``NotARepository`` if there is none.

    Whose versions are read: those signed with ``trusted_keys`` (see ``key_files.trust``), else with those that the environment
    names, else with those that the repository asks for; if there are none of either, everybody's.
    """
    store, trust = open_store(uri), key_files.trust(trusted_keys)
    try:
        marker = records.load(store.get(keys.MARKER, max_bytes=MAX_MARKER), keys.MARKER)
    except Damaged as error:
        raise Damaged(error.what, subject=error.subject, remedy=REPAIR) from error
    except NotFound:
        _refuse_lost_marker(store)
        if next(iter(store.list("")), None) is None:
            remedy = "check the path; the first save makes one"
            raise NotARepository("there is no repository here", subject=store.uri, remedy=remedy) from None
        raise NotARepository(f"objects lie here, but no {keys.MARKER}", subject=store.uri, remedy="check the path") from None
    signed_by = load_keys(marker["signed_by"], keys.MARKER) if "signed_by" in marker else ()
    return Repository(store, records.field(marker, "repository", str, keys.MARKER), clock=clock, trust=trust, signed_by=signed_by)


def latest_version(uri: str, *, trusted_keys: str | os.PathLike[str] | None = None) -> Version | None:
    """What ``open_repository(uri).latest()`` gives, by one read: of the root, which tells itself whose it is.

    The marker is read, and held against it, when the version's record is.
    """
    store = open_store(uri)
    try:
        root = Root.load(store.get(keys.ROOT, max_bytes=MAX_ROOT))
    except (NotFound, Damaged):
        return open_repository(uri, trusted_keys=trusted_keys).latest()
    trust = _TrustOfMarker(uri=store.uri, trusted_keys=trusted_keys)
    return Version(store, root.versions[-1], root.repository, trust, root.versions) if root.versions else None


@dataclass(frozen=True, kw_only=True)
class _TrustOfMarker(Trust):
    """Opens the repository when one of its versions is to be checked, and trusts whom that trusts."""

    uri: str
    trusted_keys: str | os.PathLike[str] | None

    def check(self, store: ObjectStore, repository: str, id: int, attempt: str, digest: bytes) -> None:
        """As ``Trust.check``. ``Damaged`` if the marker is that of another repository."""
        opened = open_repository(self.uri, trusted_keys=self.trusted_keys)
        if opened.id != repository:
            raise Damaged(f"is of repository {opened.id}, but {keys.ROOT} is of {repository}", subject=keys.MARKER, remedy=REPAIR)
        opened.trust.check(store, repository, id, attempt, digest)


def create_repository(uri: str, *, clock: Clock = SYSTEM, signer: Signer | None = None) -> Repository:
    """Open the repository at ``uri``, making it if there is none; several callers at once get the same one.

    One that is made with a ``signer`` asks for signatures ever after: by its key, or by one that this process trusts.
    A store is probed before it is used for the first time: one that lets two conditional writes win is refused.
    """
    store = open_store(uri)
    try:
        store.get(keys.MARKER, max_bytes=MAX_MARKER)
    except NotFound:
        _refuse_lost_marker(store)
        probe_conditional_writes(store, clock)
        fields = {"repository": clock.token() + clock.token(), "created": clock.now(), **_signed_by(signer)}
        try:
            store.put_if(keys.MARKER, records.dump(fields, keys.MARKER), None)
        except PreconditionFailed:
            pass  # another creator was faster: its marker counts
    repository = open_repository(uri, clock=clock)
    try:
        repository.register.read()
    except NotFound:
        # A creator died between marker and root, unless there are versions: then a root was lost.
        if next(iter(store.list(keys.VERSIONS)), None) is not None:
            raise Damaged("the repository's root is missing, but versions exist", subject=keys.ROOT, remedy=REPAIR) from None
        repository.register.create(Root(repository=repository.id))
    return repository


def _refuse_lost_marker(store: ObjectStore) -> None:
    """``Damaged`` if a repository lies here that has lost its marker: none must be made over it."""
    found = any(info.key == keys.ROOT for info in store.list(keys.ROOT))
    found = found or any(keys.attempt_of(info.key) for info in store.list(keys.VERSIONS))
    # Looked for again: another creator may have made it meanwhile, and the root after it.
    if found and not any(info.key == keys.MARKER for info in store.list(keys.MARKER)):
        raise Damaged("the repository's marker is missing", subject=keys.MARKER, remedy=REPAIR) from None


def _signed_by(signer: Signer | None) -> dict[str, list[str]]:
    """What a new marker says of signatures. ``Untrusted`` if this process would not read what ``signer`` signs."""
    trust = key_files.trust() or Trust()
    trust.admit(signer)
    return {"signed_by": dump_keys(tuple(dict.fromkeys((signer.public, *trust.keys))))} if signer is not None else {}
