"""The agreement of ranks that restore together on one version.

If each rank read "the newest version" by itself, a commit could come between two of them; and if one finds the newest damaged,
all must fall back. A version that they ask for by name is looked up once, and no other is restored instead. A state made of two
versions is never returned.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...storage.clock import Clock
from ...storage.errors import (
    ClusterError,
    Damaged,
    DeadlineExceeded,
    NotARepository,
    NotFound,
    RankRestarted,
    RaystowError,
    StateError,
)
from ...storage.format.root import Entry
from ...storage.format.version_record import RestoreInfo
from ...storage.log import about
from ...storage.repository import Repository
from ...storage.version_selector import LATEST, select
from ...workers.protocol.messages import NO_GROUP, RankReading, RestoreChoice, RestoreGroup, RestoreVote, UnusedNames
from .version_cache import VersionCache

logger = logging.getLogger(__name__)

_LISTED = 8  # ranks that an error lists for each version


@dataclass
class RestoreRound:
    """One restore of all ranks. ``version``: the one that the first rank asks for; ``asked``: those of all ranks; ``missing``:
    why there is no such version. ``candidates``: newest first, the first is being tried. ``votes``: the damage that each rank has
    found in it; ``damaged``: whether any has, and not only names that it lacks. ``held``: a candidate that is not a version, but
    complete in memory. ``store_down``: the store did not answer, and cannot take a lease either. ``nodes``: of the ranks.
    ``joined``: whether all ranks have joined; their nodes are the ``group`` then. ``begun``: when the first joined, in monotonic
    seconds. ``read``: bytes by source that each rank has read. ``alike``: whether all ranks restore tensors of the same names;
    else they compare: ``compared`` are the ranks that have told or used all names of the first candidate, ``unused`` are the
    names that all of these leave unused."""

    world_size: int
    version: str
    candidates: list[Entry]
    deadline: float
    begun: float
    read: dict[int, Mapping[str, int]] = field(default_factory=dict)
    nodes: dict[int, str] = field(default_factory=dict)
    joined: bool = False
    group: RestoreGroup = NO_GROUP
    members: dict[int, tuple[str, int]] = field(default_factory=dict)
    asked: dict[int, str] = field(default_factory=dict)
    missing: NotFound | None = None
    alike: bool = True
    names: dict[int, int] = field(default_factory=dict)
    compared: set[int] = field(default_factory=set)
    unused: bytes | None = None
    votes: dict[int, str] = field(default_factory=dict)
    damaged: bool = False
    held: RestoreChoice | None = None
    store_down: bool = False
    lease: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    done: bool = False
    failure: RaystowError | None = None

    def answers(self, tried: Entry | None) -> bool:
        """Whether a rank that has ``tried`` this version can be answered. The first answer waits for all ranks, since they share
        reads and must ask for the same version."""
        if self.done or self.failure is not None:
            return True
        if not self.joined and (self.missing or (tried is None and self.candidates)):
            return False
        return tried not in self.candidates[:1]

    @property
    def has_compared(self) -> bool:
        """Whether a rank can be answered that has told which names it leaves unused."""
        return self.unused == b"" or len(self.compared) == self.world_size or self.done or self.failure is not None

    def unused_by_all(self) -> bytes:
        """The bits of the names that all ranks leave unused. Raises if the round has failed, but not after all have told: then
        all have the same answer."""
        if self.failure is not None and self.unused != b"" and len(self.compared) < self.world_size:
            raise self.failure
        return self.unused or b""

    def uses_all(self, rank: int) -> None:
        """Note that a rank leaves no name unused, or does not compare any more."""
        if rank not in self.compared:
            self.unused = b""
            self.compared.add(rank)

    def answer(self, tried: Entry | None) -> Entry | None:
        """The answer for a rank that has ``tried`` this version: the version to restore, or the one that all have restored; None
        if there is none. Raises if the round has failed, but not before the rank has tried the version that all have joined
        for: its own error may say more."""
        if self.failure is not None and not (tried is None and self.joined and self.candidates):
            raise self.failure
        return self.candidates[0] if self.candidates else None


def falling_back(tried: Entry, to: Entry, damage: str, *, whole: bool) -> str:
    """The log message of a fall-back. ``whole``: see ``RestoreVote``."""
    what = "holds too little" if whole else "IS DAMAGED"
    version = "version" if whole else "VERSION"
    return f"{version} {tried.id} (step {tried.step}) {what}, falling back to version {to.id} (step {to.step}): {damage}"


def none_left(uri: str, version: str, last: Entry, damage: str, *, whole: bool) -> Damaged:
    """The error when no other version is left to try. ``version``: the one that was asked for."""
    if version != LATEST:
        remedy = 'choose another version; "latest" takes the newest one that is whole'
        return Damaged(damage, subject=f"version {last.id} (step {last.step})", remedy=remedy)
    what = "no version is whole and holds all that is asked for" if whole else "no version is whole"
    remedy = "strict=False and an `into` without the optimizer's state restore the weights of a thinned version" if whole else ""
    return Damaged(f"{what}; the last, {last.id}: {damage}", subject=uri, remedy=remedy)


def _listed(ranks: list[int]) -> str:
    """The first ranks, and how many more there are."""
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return f"{ranks[:_LISTED]}{more}"


class RestoreRounds:
    """The rounds of one repository. Waits for the store as long as ``known`` does. ``is_current``: whether there was no rollback
    since the save with an id began.

    Not thread-safe, but another thread may call ``answers`` and ``answer`` of a round at any time. So each method changes what
    they return only after its calls of the store, and then ``changes``.
    """

    def __init__(
        self,
        repository: Repository,
        clock: Clock,
        known: VersionCache,
        *,
        is_current: Callable[[int], bool] = lambda save: True,
        on_fall_back: Callable[[], None] = lambda: None,
    ) -> None:
        self._repository, self._clock, self._known = repository, clock, known
        self._is_current, self._on_fall_back = is_current, on_fall_back
        self._open: RestoreRound | None = None
        self._ended: dict[int, tuple[tuple[str, int], RestoreRound]] = {}  # rank -> the last round that ended, and its member
        self.changes = 0
        """The number of changes of all rounds."""
        self._restored: list[RestoreInfo] = []

    @property
    def in_use(self) -> bool:
        """Whether a round is open."""
        return self._open is not None

    def vote(self, vote: RestoreVote, held: RestoreChoice | None = None) -> RestoreRound:
        """Take a rank's vote. When all have tried a version that is damaged for one of them, go on to the next version.

        ``held``: a save that is complete in memory but not a version; a new round starts with it.
        """
        member, ended = self._ended.get(vote.rank, (None, None))
        if ended is not None and member == (vote.incarnation, vote.number):  # the round ended while this rank was busy
            return ended
        round = self._round_of(vote, held if vote.allow_uncommitted else None)
        if vote.rank not in round.members or (vote.tried is not None and vote.rank not in round.votes):  # not a repetition
            round.deadline = self._clock.monotonic() + vote.timeout
        round.members[vote.rank] = vote.incarnation, vote.number
        round.asked[vote.rank] = vote.version
        round.nodes[vote.rank] = vote.node
        round.names[vote.rank] = vote.names
        if not round.joined and len(round.members) == round.world_size:
            round.group = RestoreGroup(self._clock.token(), tuple(sorted({*round.nodes.values()} - {""})))
            self._check_asked(round)
            round.alike = len({*round.names.values()}) == 1
            round.joined = True  # last: ranks can be answered now
            self.changes += 1
        if vote.error:
            self._fail(round, ClusterError(f"rank {vote.rank} could not restore: {vote.error}"))
        if round.failure is not None or vote.tried is None or vote.tried not in round.candidates[:1]:
            return round
        round.uses_all(vote.rank)
        round.votes[vote.rank] = vote.damage
        round.damaged = round.damaged or bool(vote.damage and not vote.whole)
        round.read[vote.rank] = vote.read
        if len(round.votes) < round.world_size:
            return round
        damage = {rank: text for rank, text in sorted(round.votes.items()) if text}
        if not damage:
            self._succeed(round, vote.tried)
        else:
            self._fall_back(round, vote.tried, damage)
        return round

    def compare(self, told: UnusedNames) -> RestoreRound:
        """Take what a rank tells of the names that it leaves unused. It waits for the others only if it leaves any."""
        member, ended = self._ended.get(told.rank, (None, None))
        if ended is not None and member == (told.incarnation, told.number):
            return ended
        round = self._open
        is_member = round is not None and round.members.get(told.rank) == (told.incarnation, told.number)
        if round is None or not is_member or told.entry not in round.candidates[:1]:
            raise RankRestarted(f"the coordinator knows no restore of rank {told.rank}", remedy="restore again")
        if told.rank in round.compared:  # a repetition
            return round
        size = -(-told.names // 8)
        if told.unused and not len(told.unused) == len(round.unused or told.unused) == size:
            self._fail(round, ClusterError(f"rank {told.rank} has found other names in version {told.entry.id} than other ranks"))
            return round
        round.deadline = self._clock.monotonic() + told.timeout
        if not told.unused:
            round.uses_all(told.rank)
        else:
            before = told.unused if round.unused is None else round.unused
            both = int.from_bytes(before, "little") & int.from_bytes(told.unused, "little")
            round.unused = both.to_bytes(len(before), "little")
            round.compared.add(told.rank)  # last: ranks can be answered now
        self.changes += 1
        return round

    def restored(self) -> list[RestoreInfo]:
        """The restores that have succeeded since the last call."""
        found, self._restored = self._restored, []
        return found

    def reading(self, rank: RankReading) -> None:
        """A rank reads on: the others wait for it."""
        member, round = (rank.incarnation, rank.number), self._open
        if round is not None and round.members.get(rank.rank, member) == member and rank.rank not in round.votes:
            round.deadline = max(round.deadline, self._clock.monotonic() + rank.timeout)

    def left(self, rank: int, incarnation: str) -> None:
        """A new process has taken a rank: the round of its previous process fails."""
        round = self._open
        if round is not None and rank in round.members and round.members[rank][0] != incarnation:
            self._fail(round, RankRestarted(f"rank {rank} was restarted during the restore", remedy="restore again"))

    def give_up(self, error: RaystowError) -> None:
        """Fail the round: the repository was deleted, or another one has taken its place."""
        if self._open is not None:
            self._fail(self._open, error)

    def tick(self) -> None:
        """Fail the round if it is past its deadline."""
        round = self._open
        if round is not None and self._clock.monotonic() > round.deadline:
            comparing = set() if round.has_compared else round.compared
            reported = {*round.votes, *comparing} if round.joined else {*round.members}
            waiting = sorted(set(range(round.world_size)) - reported)
            self._fail(round, DeadlineExceeded(f"ranks {waiting} have not restored what the others have"))

    def _round_of(self, vote: RestoreVote, held: RestoreChoice | None) -> RestoreRound:
        if (round := self._open) is not None:
            member = vote.incarnation, vote.number
            what = f"rank {vote.rank} has begun another restore"
            if round.world_size != vote.world_size:
                what = f"the world size changed from {round.world_size} to {vote.world_size} during the restore"
            elif round.members.get(vote.rank, member) == member:
                return round
            self._fail(round, ClusterError(what, remedy="restore again"))
        root, said = self._known.root()
        round = RestoreRound(vote.world_size, vote.version, list(reversed(root.versions)), 0.0, self._clock.monotonic())
        round.store_down = not said
        newest = root.versions[-1].id if root.versions else 0
        if vote.version != LATEST:
            try:
                round.candidates = [select(root, vote.version, self._repository.uri)]
            except NotFound as error:
                round.candidates, round.missing = [], error
        elif held is not None and held.entry.id > newest and self._is_current(held.entry.id):
            round.held = held
            round.candidates.insert(0, held.entry)
        round.candidates = self._lease(round, round.candidates)
        if round.candidates or (round.missing and root.versions):
            self._open = round
        else:
            round.failure = round.missing  # an empty repository: there is nothing to agree on
        return round

    def _check_asked(self, round: RestoreRound) -> None:
        """Fail a round that all ranks have joined if they ask for different versions, or for one that does not exist."""
        ranks: dict[str, list[int]] = {}
        for rank, version in sorted(round.asked.items()):
            ranks.setdefault(version, []).append(rank)
        if len(ranks) > 1:
            what = ", ".join(f"{version!r} by ranks {_listed(of)}" for version, of in ranks.items())
            remedy = "pass the same version on all ranks"
            error = StateError(f"different versions are asked for: {what}", subject=self._repository.uri, remedy=remedy)
            self._fail(round, error)
            round.candidates = []
        elif round.missing is not None:
            self._fail(round, round.missing)

    def _succeed(self, round: RestoreRound, entry: Entry) -> None:
        seconds = self._clock.monotonic() - round.begun
        read = Counter[str]()
        for part in round.read.values():
            read.update(part)
        self._restored.append(RestoreInfo(entry.id, entry.step, self._clock.now(), round.world_size, seconds, dict(read)))
        round.done = True
        self._close(round)

    def _fall_back(self, round: RestoreRound, entry: Entry, damage: dict[int, str]) -> None:
        try:  # a version that was deleted with its repository is not damaged
            self._repository.root()
        except NotARepository as error:
            self._fail(round, error)
            return
        except RaystowError:
            pass  # the lease says so
        texts = "; ".join(f"rank {rank}: {text}" for rank, text in damage.items())
        whole, older = not round.damaged, round.candidates[1:]
        round.lease.close()
        if not whole:
            self._on_fall_back()
        if older:
            log = about(logger, repository=self._repository.uri, version=entry.id, attempt=entry.attempt, step=entry.step)
            log.error("%s", falling_back(entry, older[0], texts, whole=whole))
        try:
            older = self._lease(round, older)
        except RaystowError as error:
            self._fail(round, error)
            return
        if not older:
            self._fail(round, none_left(self._repository.uri, round.version, entry, texts, whole=whole))
        round.votes.clear()
        round.compared.clear()
        round.damaged, round.unused = False, None
        round.candidates = older  # last: ranks that have tried `entry` can be answered now
        self.changes += 1

    def _lease(self, round: RestoreRound, candidates: list[Entry]) -> list[Entry]:
        """Lease the first candidate that was not dropped, so that it is not collected. Returns it and those after it."""
        for index, entry in enumerate(candidates):
            if round.store_down or (round.held and entry == round.held.entry):  # the latter is not a version, so not collected
                return candidates[index:]
            try:
                round.lease.enter_context(self._repository.lease(self._repository.at(entry)))
            except NotFound as error:
                round.missing = None if round.version == LATEST else error
            else:
                return candidates[index:]
        return []

    def _fail(self, round: RestoreRound, error: RaystowError) -> None:
        round.failure = error
        self._close(round)

    def _close(self, round: RestoreRound) -> None:
        self.changes += 1
        self._ended.update((rank, (member, round)) for rank, member in round.members.items())
        self._open = None
        round.lease.close()
