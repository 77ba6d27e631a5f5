"""A repository: one run's checkpoints under one URI. Opening, listing, reading, pinning."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from . import keys, records, retention
from .clock import SYSTEM, Clock
from .errors import Damaged, NotARepository, NotFound, PreconditionFailed, StateError
from .object_store import ObjectStore
from .probe import probe_conditional_writes
from .retention_plan import RetentionPlan
from .root import Register, Root
from .stores import open_store
from .verify import Verified, verify
from .version import Version

_MAX_MARKER = 64 << 10  # bytes
_RECORDS_AT_ONCE = 16


class Repository:
    """A repository that exists. Listing and reading need no Ray, no GPU and no lock: a version never changes."""

    def __init__(self, store: ObjectStore, id: str, *, clock: Clock = SYSTEM) -> None:
        self.store, self.id, self.clock = store, id, clock
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
            raise Damaged("the repository's root is missing", subject=keys.ROOT) from None

    def versions(self) -> list[Version]:
        """Every committed version, oldest first. One read."""
        return [Version(self.store, entry, self.id) for entry in self.root().versions]

    def latest(self) -> Version | None:
        """The newest version, or None if there is none yet."""
        versions = self.versions()
        return versions[-1] if versions else None

    def version(self, id: int) -> Version:
        """The version with this id."""
        for version in self.versions():
            if version.id == id:
                return version
        raise StateError(f"there is no version {id}", subject=self.uri, remedy="`raystow ls` lists what there is")

    def verify(self, version: Version, progress: Callable[[int], None] = lambda nbytes: None) -> Verified:
        """Read every byte of a version and hold it against its digests; ``Damaged`` names the first object found wrong."""
        return verify(version, self.store, progress)

    def orphans(self) -> list[str]:
        """Keys of objects that belong to no live version: of dropped ones, and of attempts that failed or are under way."""
        live = {(entry.id, entry.attempt) for entry in self.root().versions}
        return [info.key for info in self.store.list(keys.VERSIONS) if keys.attempt_of(info.key) not in live]

    def pin(self, version: Version, name: str) -> None:
        """Give a version a name under which it is kept for good. A name holds one version: the last one pinned to it."""

        def change(root: Root) -> Root:
            if all(entry.id != version.id for entry in root.versions):
                raise StateError(f"there is no version {version.id} to pin", subject=self.uri)
            return root if root.pins.get(name) == version.id else replace(root, pins={**root.pins, name: version.id})

        self.register.update(change)

    def unpin(self, name: str) -> None:
        """Drop a pin; none of that name is no error."""

        def change(root: Root) -> Root:
            return replace(root, pins={k: v for k, v in root.pins.items() if k != name}) if name in root.pins else root

        self.register.update(change)

    def plan_retention(self, policy: retention.Policy) -> RetentionPlan:
        """What ``policy`` keeps and drops of the versions there are now; changes nothing before ``execute()`` is called.

        Reads the root and, if the policy has ``keep_best``, every version's record.
        """
        root = self.root()
        metrics: dict[int, dict[str, Any]] = {}
        if policy.keep_best is not None:
            versions = [Version(self.store, entry, self.id) for entry in root.versions]
            with ThreadPoolExecutor(_RECORDS_AT_ONCE) as pool:
                metrics = dict(pool.map(lambda version: (version.id, version.metrics), versions))
        return RetentionPlan(self.register, retention.plan(root.versions, policy, pins=root.pins, metrics=metrics))


def open_repository(uri: str, *, clock: Clock = SYSTEM) -> Repository:
    """Open the repository at ``uri`` for reading; ``NotARepository`` if there is none."""
    store = open_store(uri)
    try:
        marker = records.load(store.get(keys.MARKER, max_bytes=_MAX_MARKER), keys.MARKER)
    except NotFound:
        if next(iter(store.list("")), None) is None:
            raise NotARepository("there is no repository here", subject=store.uri, remedy="the first save makes one") from None
        if any(info.key == keys.ROOT for info in store.list(keys.ROOT)):
            raise Damaged("the repository's marker is missing", subject=keys.MARKER) from None
        raise NotARepository(f"objects lie here, but no {keys.MARKER}", subject=store.uri, remedy="check the path") from None
    return Repository(store, records.field(marker, "repository", str, keys.MARKER), clock=clock)


def create_repository(uri: str, *, clock: Clock = SYSTEM) -> Repository:
    """Open the repository at ``uri``, making it if there is none; several callers at once get the same one.

    A store is probed before it is used for the first time: one that lets two conditional writes win is refused.
    """
    store = open_store(uri)
    try:
        store.get(keys.MARKER, max_bytes=_MAX_MARKER)
    except NotFound:
        if any(info.key == keys.ROOT for info in store.list(keys.ROOT)):
            raise Damaged("the repository's marker is missing", subject=keys.MARKER) from None
        probe_conditional_writes(store, clock)
        marker = records.dump({"repository": clock.token() + clock.token(), "created": clock.now()}, keys.MARKER)
        try:
            store.put_if(keys.MARKER, marker, None)
        except PreconditionFailed:
            pass  # another creator was faster: its marker counts
    repository = open_repository(uri, clock=clock)
    try:
        repository.register.read()
    except NotFound:
        # A creator died between marker and root, unless there are versions: then a root was lost.
        if next(iter(store.list(keys.VERSIONS)), None) is not None:
            raise Damaged("the repository's root is missing, but versions exist", subject=keys.ROOT) from None
        repository.register.create(Root(repository=repository.id))
    return repository
