"""One version for all: how the ranks that restore together agree on what they restore.

Each of them could read "the newest version" by itself, but a commit may come between two of them; and where one finds the
newest damaged, the others must fall back with it. A state made of two versions is worse than none.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..storage.clock import Clock
from ..storage.errors import ClusterError, Damaged, DeadlineExceeded, NotFound, RaystowError
from ..storage.format.root import Entry
from ..storage.format.version_record import RestoreInfo
from ..storage.log import about
from ..storage.repository import Repository
from ..workers.fetching.claims import ALONE, Company
from .known import Known

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Vote:
    """A rank's word in a round. ``number``: how many restores its process has begun. ``tried``: the version it has just tried, or
    None at first; ``damage``: what was wrong with it, empty if it is restored; ``whole``: it is not damaged, but holds less than
    is asked for. ``error``: why this rank gives up altogether.
    ``timeout``: the seconds it waits for others. ``allow_uncommitted``: a save that is not durable yet will do. ``node``: the one
    it runs on, if that has a node worker. ``read``: stored bytes that it has read of the version, by where they came from."""

    rank: int
    world_size: int
    incarnation: str
    number: int
    timeout: float
    tried: Entry | None = None
    damage: str = ""
    error: str = ""
    allow_uncommitted: bool = True
    node: str = ""
    read: Mapping[str, int] = field(default_factory=dict)
    whole: bool = False


@dataclass(frozen=True)
class Choice:
    """A version to restore. ``near``: number of a node that saved it -> the nodes that have all its objects in memory.
    ``record``: the version's record, where the coordinator still has it. ``company``: the nodes of all ranks. ``bases``: the same
    of the versions that it is a difference to, as far as the coordinator knows them."""

    entry: Entry
    near: Mapping[int, Sequence[str]] = field(default_factory=dict)
    record: bytes = b""
    company: Company = ALONE
    bases: tuple[Choice, ...] = ()

    @property
    def needed(self) -> Iterator[Choice]:
        """All versions that it cannot be read without, as far as they are known."""
        for base in self.bases:
            yield base
            yield from base.needed

    @property
    def records(self) -> tuple[bytes, ...]:
        """Its record, and those of what it needs; ``with_records`` puts them back."""
        return self.record, *(record for base in self.bases for record in base.records)

    def with_records(self, records: Iterable[bytes]) -> Choice:
        """The same with these records."""
        left = iter(records)
        return replace(self, record=next(left), bases=tuple(base.with_records(left) for base in self.bases))

    @staticmethod
    def of(
        entry: Entry,
        known: Sequence[Entry],
        near: Mapping[str, Mapping[int, Sequence[str]]],
        record: Callable[[Entry], bytes],
    ) -> Choice:
        """A version and what it needs. ``known``: the versions of the repository. ``near``: by attempt. ``record``: that of a
        version, empty if it is not here."""
        needs = [base for base in known if base.id in entry.bases and base.id < entry.id]
        bases = tuple(Choice.of(base, known, near, record) for base in needs)
        return Choice(entry, near.get(entry.attempt, {}), record(entry), bases=bases)


@dataclass
class Round:
    """One restore of all ranks. ``candidates``: newest first, the first is being tried. ``votes``: what each rank says of it;
    ``damaged``: that any of them has found damage, and not only that it holds too little.
    ``held``: a candidate that is no version. ``blind``: the store did not answer, and would take no lease either. ``nodes``:
    where the ranks are; once all have ``come``, that is the ``company``. ``begun``: when the first came, in monotonic seconds.
    ``read``: what each has read."""

    world_size: int
    candidates: list[Entry]
    deadline: float
    begun: float
    read: dict[int, Mapping[str, int]] = field(default_factory=dict)
    nodes: dict[int, str] = field(default_factory=dict)
    come: bool = False
    company: Company = ALONE
    members: dict[int, tuple[str, int]] = field(default_factory=dict)
    votes: dict[int, str] = field(default_factory=dict)
    damaged: bool = False
    held: Choice | None = None
    blind: bool = False
    lease: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    done: bool = False
    failure: RaystowError | None = None

    def answers(self, tried: Entry | None) -> bool:
        """Whether a rank that has ``tried`` this version can be told what comes now: at first not before all have come, since
        they share what they read."""
        if tried is None and self.candidates and not self.come and self.failure is None:
            return False
        return self.done or self.failure is not None or tried not in self.candidates[:1]

    def answer(self, tried: Entry | None) -> Entry | None:
        """What to tell a rank that has ``tried`` this version: the one to restore, or that was restored by all; None if there is
        none. Raises if the round has failed. But what all have come for, a rank may try once: what keeps another from restoring
        may keep this one too, and then its own error says more."""
        if self.failure is not None and not (tried is None and self.come and self.candidates):
            raise self.failure
        return self.candidates[0] if self.candidates else None


def falling_back(tried: Entry, to: Entry, damage: str, *, whole: bool) -> str:
    """What the log says when another version is tried. ``whole``: see ``Vote``."""
    what = "holds too little" if whole else "IS DAMAGED"
    version = "version" if whole else "VERSION"
    return f"{version} {tried.id} (step {tried.step}) {what}, falling back to version {to.id} (step {to.step}): {damage}"


def none_left(uri: str, last: Entry, damage: str, *, whole: bool) -> Damaged:
    """What a restore raises when there is no other version to try."""
    what = "no version is whole and holds all that is asked for" if whole else "no version is whole"
    remedy = "strict=False and an `into` without the optimizer's state restore the weights of a thinned version" if whole else ""
    return Damaged(f"{what}; the last, {last.id}: {damage}", subject=uri, remedy=remedy)


class Rounds:
    """The rounds of one repository. Not for several threads at once; may wait for the store, for as long as ``known`` does."""

    def __init__(
        self, repository: Repository, clock: Clock, known: Known, *, on_fall_back: Callable[[], None] = lambda: None
    ) -> None:
        self._repository, self._clock, self._known, self._on_fall_back = repository, clock, known, on_fall_back
        self._open: list[Round] = []
        self._failed: dict[int, tuple[tuple[str, int], Round]] = {}  # rank -> the last failed round, and whom it had
        self.changes = 0
        """How often any round has come to another version or to its end: all that anyone waits for."""
        self._restored: list[RestoreInfo] = []

    def vote(self, vote: Vote, held: Choice | None = None) -> Round:
        """Take a rank's word, and go on to the next version when all have tried one that is damaged for some.

        ``held``: a save of which all is in the memory of nodes, though it is no version; a new round begins with it.
        """
        whom, failed = self._failed.get(vote.rank, (None, None))
        if failed is not None and whom == (vote.incarnation, vote.number):  # this rank was busy when it failed
            return failed
        round = self._round_of(vote, held if vote.allow_uncommitted else None)
        round.members[vote.rank] = vote.incarnation, vote.number
        round.nodes[vote.rank] = vote.node
        if not round.come and len(round.members) == round.world_size:
            round.come, round.company = True, Company(self._clock.token(), sorted({*round.nodes.values()} - {""}))
            self.changes += 1
        round.deadline = self._clock.monotonic() + vote.timeout
        if vote.error:
            self._fail(round, ClusterError(f"rank {vote.rank} could not restore: {vote.error}"))
        if round.failure is not None or vote.tried is None or vote.tried not in round.candidates[:1]:
            return round
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

    def restored(self) -> list[RestoreInfo]:
        """The restores that have succeeded since the last call."""
        found, self._restored = self._restored, []
        return found

    def left(self, rank: int, incarnation: str) -> None:
        """A new process has taken up a rank: what its former one was part of has failed."""
        for round in list(self._open):
            if rank in round.members and round.members[rank][0] != incarnation:
                self._fail(round, ClusterError(f"rank {rank} was restarted during the restore", remedy="restore again"))

    def tick(self) -> None:
        """Fail the rounds in which nobody was heard of for too long."""
        for round in list(self._open):
            if self._clock.monotonic() > round.deadline:
                heard = round.votes if round.come else round.members
                waiting = sorted(set(range(round.world_size)) - set(heard))
                self._fail(round, DeadlineExceeded(f"ranks {waiting} have not restored what the others have"))

    def _round_of(self, vote: Vote, held: Choice | None) -> Round:
        for round in list(self._open):
            if round.world_size != vote.world_size:
                what = f"the world size changed from {round.world_size} to {vote.world_size} during the restore"
                self._fail(round, ClusterError(what, remedy="restore again"))
            elif round.members.get(vote.rank, (vote.incarnation, vote.number)) == (vote.incarnation, vote.number):
                return round
            else:
                self._fail(round, ClusterError(f"rank {vote.rank} has begun another restore", remedy="restore again"))
        versions, said = self._known.versions()
        round = Round(vote.world_size, list(reversed(versions)), 0.0, self._clock.monotonic(), blind=not said)
        if held is not None and all(held.entry.id > entry.id for entry in round.candidates):
            round.held = held
            round.candidates.insert(0, held.entry)
        self._lease(round)
        if round.candidates:
            self._open.append(round)
        return round

    def _succeed(self, round: Round, entry: Entry) -> None:
        seconds = self._clock.monotonic() - round.begun
        read = Counter[str]()
        for part in round.read.values():
            read.update(part)
        self._restored.append(RestoreInfo(entry.id, entry.step, self._clock.now(), round.world_size, seconds, dict(read)))
        round.done = True
        self._close(round)

    def _fall_back(self, round: Round, entry: Entry, damage: dict[int, str]) -> None:
        texts = "; ".join(f"rank {rank}: {text}" for rank, text in damage.items())
        round.candidates.pop(0)
        self.changes += 1
        round.votes.clear()
        round.read.clear()
        round.lease.close()
        whole, round.damaged = not round.damaged, False
        if not whole:
            self._on_fall_back()
        if round.candidates:
            log = about(logger, repository=self._repository.uri, version=entry.id, attempt=entry.attempt, step=entry.step)
            log.error("%s", falling_back(entry, round.candidates[0], texts, whole=whole))
            self._lease(round)
        if not round.candidates:
            self._fail(round, none_left(self._repository.uri, entry, texts, whole=whole))

    def _lease(self, round: Round) -> None:
        """Keep the first candidate from being collected; pass over those that were dropped meanwhile."""
        if round.blind:
            return
        while round.candidates and not (round.held and round.candidates[0] == round.held.entry):  # nobody collects that
            version = self._repository.at(round.candidates[0])
            try:
                round.lease.enter_context(self._repository.lease(version))
                return
            except NotFound:
                round.candidates.pop(0)

    def _fail(self, round: Round, error: RaystowError) -> None:
        round.failure = error
        self._failed.update((rank, (whom, round)) for rank, whom in round.members.items())
        self._close(round)

    def _close(self, round: Round) -> None:
        self.changes += 1
        if round in self._open:
            self._open.remove(round)
        round.lease.close()
