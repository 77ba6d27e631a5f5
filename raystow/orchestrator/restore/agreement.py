"""How a restoring process learns which version to restore: by itself, or together with the other ranks."""

from __future__ import annotations

import contextlib
import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence

from msgspec.structs import replace

from ...storage.errors import Damaged, NotFound, RankRestarted, RaystowError
from ...storage.format import keys
from ...storage.format.keys import PlaceInAttempt
from ...storage.format.parts import is_part
from ...storage.format.root import Entry
from ...storage.limits import MAX_ROWS
from ...storage.log import about
from ...storage.repository import Repository
from ...storage.runtime.clock import SYSTEM
from ...storage.runtime.metrics import RESTORED, record
from ...storage.versions.version import Bases, Version
from ...storage.versions.version_selector import LATEST, VersionSelector, select, selector_text
from ...workers.cache.node_cache_store import NodeCacheStore, ObjectLocation
from ...workers.protocol.coordinator_client import CoordinatorClient
from ...workers.protocol.messages import RankReading, RestoreChoice, RestoreVote, UnusedNames, shortened
from ...workers.protocol.messages.coordinator import NO_VERSION
from ..heartbeat import Heartbeat, StallWatch
from .name_check import OtherRanks, Unused
from .name_match import name_bits, named
from .plan import Sources, by_source
from .rounds import falling_back, none_left

logger = logging.getLogger(__name__)


class Agreement(OtherRanks, ABC):
    """Call ``settle`` until it returns the version tried last: all ranks have restored it then.

    Attributes:
        sources: Of the objects of the last version.
    """

    sources: Sources

    @abstractmethod
    def settle(self, tried: Entry | None, damage: str, *, whole: bool = False) -> Entry | None:
        """The version to restore next, after ``tried`` (None at first) had the error ``damage`` (empty: it is restored).
        ``whole``: it is not damaged, but lacks names that are asked for.

        None if there is no version. Raises ``Damaged`` if no other is left to try.
        """

    @abstractmethod
    def version(self, entry: Entry) -> Version:
        """The version, read through the best sources."""

    @abstractmethod
    def reading(self) -> None:
        """Tell the other ranks now and then that this rank reads on. Call it for each chunk, on any thread."""

    @abstractmethod
    def give_up(self, error: str) -> None:
        """Report to the other ranks that this rank cannot restore."""

    @property
    def trace(self) -> str | None:
        """Of the restore's span; see ``storage.runtime.spans``. None: the current span, if there is one."""
        return None


class LocalAgreement(Agreement):
    """The version that is asked for, leased while it is tried; with ``fall_back``, older ones after the latest one.

    One of several ranks without a coordinator must not fall back, since the others may not.
    """

    def __init__(self, repository: Repository, version: VersionSelector = LATEST, *, fall_back: bool) -> None:
        self._repository, self._fall_back = repository, fall_back
        self._version = selector_text(version, repository.id)
        self.sources = Sources()
        self.advice = "" if fall_back else "restore through a raystow.Checkpointer, which knows what the other ranks restore"
        self._lease = contextlib.ExitStack()
        self._siblings: Sequence[Entry] = ()

    def settle(self, tried: Entry | None, damage: str, *, whole: bool = False) -> Entry | None:
        self._lease.close()
        if tried is not None and not damage:
            return tried
        root = self._repository.root()  # first: a version that was deleted with its repository is not damaged
        if tried is not None and self._version != LATEST:
            raise none_left(self._repository.uri, self._version, tried, damage, whole=whole)
        if tried is not None and not self._fall_back:
            remedy = "restore through a Checkpointer, with which all ranks fall back together"
            raise Damaged(damage, subject=f"version {tried.id}", remedy=remedy)
        self._siblings = root.versions
        if self._version != LATEST:
            chosen = select(root, self._version, self._repository.uri)
            self._lease.enter_context(self._repository.lease(self._repository.at(chosen)))
            return chosen
        older = [entry for entry in self._siblings if tried is None or entry.id < tried.id]
        while older:
            entry = older.pop()
            try:
                self._lease.enter_context(self._repository.lease(self._repository.at(entry)))
            except NotFound:
                continue  # dropped meanwhile
            if tried is not None:
                log = about(logger, repository=self._repository.uri, version=tried.id, attempt=tried.attempt, step=tried.step)
                log.error("%s", falling_back(tried, entry, damage, whole=whole))
            return entry
        if tried is None:
            return None
        raise none_left(self._repository.uri, self._version, tried, damage, whole=whole)

    def version(self, entry: Entry) -> Version:
        return self._repository.at(entry, siblings=self._siblings)

    @property
    def alike(self) -> bool:
        return self._fall_back

    def reading(self) -> None: ...

    def give_up(self, error: str) -> None:
        self._lease.close()


class ClusterAgreement(Agreement):
    """The agreement of all ranks of a run: the coordinator chooses and leases versions, and knows the contents of node memories.

    If the process of another rank is replaced meanwhile, the ranks begin again together; a rank that has restored the version
    that they choose then does not read it again.

    ``opening``: this rank's first vote; ``numbers``: those of later restores of its process. ``address``: of its node worker, on
    the node with the id ``here``.
    """

    def __init__(
        self,
        repository: Repository,
        port: CoordinatorClient,
        opening: RestoreVote,
        numbers: Iterator[int],
        address: Callable[[], str],
        *,
        here: str = "",
    ) -> None:
        self._repository, self._port, self._numbers, self._address = repository, port, numbers, address
        self._heartbeat, self._watch = Heartbeat(port.send), StallWatch(self._stalled)
        self._patience = SYSTEM.monotonic() + opening.timeout
        self._opening = replace(opening, node=here)
        self._here, self.sources = here, Sources()
        self._log = about(logger, repository=repository.uri, rank=opening.rank)
        self._choice: RestoreChoice | None = None
        self.cache: NodeCacheStore | None = None
        """Reads through the node worker, while a version is restored."""

    def settle(self, tried: Entry | None, damage: str, *, whole: bool = False) -> Entry | None:
        read = dict(self.cache.read) if self.cache is not None else {}
        try:  # the node worker keeps the data that was read until all ranks have finished
            self._choice = self._vote(replace(self._opening, tried=tried, damage=shortened(damage), whole=whole, read=read))
        finally:
            self._end_read()
        return None if self._choice is None else self._choice.entry

    def _vote(self, vote: RestoreVote) -> RestoreChoice | None:
        """Vote, and begin again whenever the process of another rank is replaced, until ``timeout`` is over."""
        asked = vote
        while True:
            try:
                answer = self._port.ask(asked, self._warn)
            except RankRestarted as error:
                if SYSTEM.monotonic() > self._patience:
                    raise
                self._log.warning("%s: all ranks agree on a version again", error.what)
                asked = self._opening = replace(self._opening, number=next(self._numbers))
                continue
            choice = answer if isinstance(answer, RestoreChoice) else None
            if asked is not self._opening or choice is None or choice.entry != vote.tried:
                return choice
            asked = replace(vote, number=self._opening.number)  # it has tried the version that is chosen again

    @property
    def past(self) -> str:
        """The round in which all ranks and parts have restored; see ``RankSaveRequest``."""
        return NO_VERSION if self._choice is None else self._choice.group.round

    def version(self, entry: Entry) -> Version:
        """The version, read through the node worker, which reads common data of its ranks once. A rank that restores alone reads
        from the store itself what no node has in memory."""
        assert self._choice is not None
        self._watch.start()
        self.sources = Sources()
        try:
            self.cache = NodeCacheStore(self._repository.store, self._address(), self._repository.id)
        except RaystowError as error:
            said = {"version": entry.id, "attempt": entry.attempt, "step": entry.step}
            self._log.warning("restoring from the store without the node worker: %s", error, extra=said)
            return self._repository.at(entry, siblings=[choice.entry for choice in self._choice.needed])
        choices = (self._choice, *self._choice.needed)
        version = self._repository.at(entry, store=self.cache)
        needed = {choice.entry.id: self._repository.at(choice.entry, store=self.cache) for choice in choices[1:]}
        # Usually without reading the root.
        version.bases = Bases(version, lambda base: needed.get(base) or version.sibling(base))
        given = {keys.record(choice.entry.id, choice.entry.attempt): choice.record for choice in choices if choice.record}
        self.cache.given = given
        records = {version.record_key: ObjectLocation(entry.size)}
        self.cache.location = records.get  # otherwise once for all ranks of the node
        near = {choice.entry.id: choice.near for choice in choices}
        self.sources = sources = Sources(near.pop(entry.id), self._here, bases=near)
        alone = self._opening.world_size == 1
        group, size_of = self._choice.group, {(version.id, version.attempt): _sizes(version)}
        for base in version.bases.all():
            records[base.record_key] = ObjectLocation(base.entry.size)
            size_of[base.id, base.attempt] = _sizes(base)

        @functools.cache
        def place(key: str) -> ObjectLocation | None:
            parts, whose = keys.place_of(key), keys.attempt_of(key)
            size = None if parts is None or whose not in size_of else size_of[whose](parts)
            if parts is None or whose is None or size is None:
                return None
            base = 0 if whose[0] == version.id else whose[0]
            if alone and not sources.holders(parts[0], base):
                return None
            return ObjectLocation(size, sources.peers(parts[0], base), group.round, group.owner(key))

        self.cache.location = place
        return version

    @property
    def alike(self) -> bool:
        return self._choice is None or self._choice.alike or is_part(self._opening.rank)

    @property
    def trace(self) -> str | None:
        return (self._choice.trace if self._choice is not None else "") or None

    def unused(self, unused: Unused) -> Collection[str]:
        """Only the ranks wait that leave names unused: none of these is unused by all if another rank has all names."""
        vote, choice = self._opening, self._choice
        assert choice is not None
        names, mine = unused.listed() if unused.names else ((), ())
        if len(names) > 8 * MAX_ROWS:  # on all ranks
            return unused.names
        who = vote.rank, vote.world_size, vote.incarnation, vote.number, vote.timeout
        report = UnusedNames(*who, choice.entry, len(names), name_bits(names, mine))
        if not report.unused:
            self._port.send(report)
            return named(names, b"")
        self._watch.stop()  # while it waits for other ranks
        common = self._port.ask(report, self._warn).unused
        self._watch.start()
        return named(names, common)

    def reading(self) -> None:
        self._watch.progress()
        self._heartbeat.beat(self._opening)

    def _stalled(self, seconds: float) -> None:
        """Say what this rank waits for, here and to the other ranks, which wait for it."""
        vote, choice, source = self._opening, self._choice, self._repository.uri
        if choice is not None and choice.near:
            source += " and the memory of nodes"
        version = choice.entry.id if choice is not None else 0
        self._log.warning("restoring version %d: nothing was read for %.0f s from %s", version, seconds, source)
        self._heartbeat.reset()
        self._port.send(RankReading(vote.rank, vote.incarnation, vote.number, vote.timeout, seconds, source))

    def give_up(self, error: str) -> None:
        self._end_read()
        with contextlib.suppress(RaystowError):
            self._port.ask(replace(self._opening, error=shortened(error)), self._warn)

    def _warn(self, text: str) -> None:
        self._log.warning("restore: %s", text)

    def _end_read(self) -> None:
        self._watch.stop()
        if self.cache is not None:
            read = self.cache.read
            self._log.info("this rank's restore has read %s", by_source(read), extra={"bytes_read": dict(read)})
            for source, nbytes in read.items():
                record(RESTORED, nbytes, repository=self._repository.uri, source=source)
            self.cache.close()
            self.cache = None


def _sizes(version: Version) -> Callable[[PlaceInAttempt], int | None]:
    """What gives the size of a fragment or pack by the rest of its key. That of a pack is known once its fragment was read, as it
    was before the pack is."""
    fragments = {info.node: info.size for info in version.record.fragments}

    def size(place: PlaceInAttempt) -> int | None:
        return fragments.get(place[0]) if len(place) == 1 else version.pack_size(*place)

    return size
