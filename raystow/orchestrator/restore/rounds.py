"""The agreement of ranks that restore together on one version.

If each rank read "the newest version" by itself, a commit could come between two of them; and if one finds the newest damaged,
all must fall back. A version that they ask for by name is looked up once, and no other is restored instead. A state made of two
versions is never returned.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone

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
from ...storage.format.parts import is_part, name_of, names_in, part_number
from ...storage.format.rank_spans import member_text, ranks_text
from ...storage.format.root import Entry
from ...storage.format.version_record import RestoreInfo
from ...storage.log import about
from ...storage.repository import Repository
from ...storage.runtime.clock import Clock
from ...storage.runtime.spans import ROOT, Span
from ...storage.versions.version_selector import LATEST, select
from ...workers.protocol.messages import (
    Incarnation,
    RankReading,
    RanksWarning,
    RestoreChoice,
    RestoreGroup,
    RestoreVote,
    UnusedNames,
)
from ..late_ranks import LATE, late_text, next_warning, with_processes
from .round import RestoreRound
from .version_cache import VersionCache

logger = logging.getLogger(__name__)

_LISTED = 8  # ranks that an error lists for each version


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
    remedy = "an `into` without the optimizer's state restores the weights of a thinned version" if whole else ""
    return Damaged(f"{what}; the last, {last.id}: {damage}", subject=uri, remedy=remedy)


def _listed(ranks: list[int]) -> str:
    """The first ranks, and how many more there are."""
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return f"{ranks[:_LISTED]}{more}"


def _from(source: str) -> str:
    return f" from {source}" if source else ""


def _overdue(what: str) -> DeadlineExceeded:
    return DeadlineExceeded(what, subject="restore", remedy="restore again on all ranks")


class RestoreRounds:
    """The rounds of one repository. Waits for the store as long as ``known`` does. ``is_current``: whether there was no rollback
    since the save with an id began. ``member``: the process that has a rank; None if none has.

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
        member: Callable[[int], Incarnation | None] = lambda rank: None,
    ) -> None:
        self._member = member
        self._missed = dict[int, tuple[Incarnation | None, RestoreRound]]()
        """Rank -> its process then, and the round that failed without it."""
        self._missed_until = 0.0
        self._repository, self._clock, self._known = repository, clock, known
        self._is_current, self._on_fall_back = is_current, on_fall_back
        self.open_round: RestoreRound | None = None
        """The round in which ranks vote."""
        self._ended: dict[int, tuple[tuple[Incarnation, int], RestoreRound]] = {}  # rank -> its last round, and its member
        self.changes = 0
        """The number of changes of all rounds."""
        self._restored: list[RestoreInfo] = []

    @property
    def in_use(self) -> bool:
        """Whether a round is open, or has failed for lack of a rank that may come soon."""
        return self.open_round is not None or (bool(self._missed) and self._clock.monotonic() < self._missed_until)

    def vote(self, vote: RestoreVote, held: RestoreChoice | None = None) -> RestoreRound:
        """Take a rank's vote. When all have tried a version that is damaged for one of them, go on to the next version.

        ``held``: a save that is complete in memory but not a version; a new round starts with it.
        """
        member, ended = self._ended.get(vote.rank, (None, None))
        if ended is not None and member == (vote.incarnation, vote.number):  # the round ended while this rank was busy
            return ended
        if (missed := self._missed_by(vote)) is not None:
            return missed
        round = self._round_of(vote, held if vote.allow_uncommitted else None)
        self._declare(round, vote)
        if vote.rank not in round.members or (vote.tried is not None and vote.rank not in round.votes):  # not a repetition
            now = self._clock.monotonic()
            round.deadline = now + vote.timeout
            if round.joined:
                round.advance(now)
        round.members[vote.rank] = vote.incarnation, vote.number
        round.patience = max(round.patience, vote.timeout)
        round.asked[vote.rank] = vote.version
        round.nodes[vote.rank] = vote.node
        round.names[vote.rank] = vote.names
        if not round.joined and round.complete:
            round.group = RestoreGroup(self._clock.token(), tuple(sorted({*round.nodes.values()} - {""})))
            self._check_asked(round)
            round.alike = len({names for rank, names in round.names.items() if not is_part(rank)}) == 1
            round.advance(self._clock.monotonic())
            round.joined = True  # last: ranks can be answered now
            self.changes += 1
        if vote.error:
            self._fail(round, ClusterError(f"{member_text(vote.rank)} could not restore: {vote.error}"))
        if round.failure is not None or vote.tried is None or vote.tried not in round.candidates[:1]:
            return round
        round.uses_all(vote.rank)
        round.votes[vote.rank] = vote.damage
        round.damaged = round.damaged or bool(vote.damage and not vote.whole)
        round.read[vote.rank] = vote.read
        if not round.complete or not round.everyone <= round.votes.keys():
            return round
        damage = {rank: text for rank, text in sorted(round.votes.items()) if text}
        if not damage:
            self._succeed(round, vote.tried)
        else:
            self._fall_back(round, vote.tried, damage)
        return round

    def compare(self, report: UnusedNames) -> RestoreRound:
        """Take what a rank tells of the names that it leaves unused. It waits for the others only if it leaves any."""
        member, ended = self._ended.get(report.rank, (None, None))
        if ended is not None and member == (report.incarnation, report.number):
            return ended
        round = self.open_round
        is_member = round is not None and round.members.get(report.rank) == (report.incarnation, report.number)
        if round is None or not is_member or report.entry not in round.candidates[:1]:
            raise RankRestarted(f"the coordinator knows no restore of rank {report.rank}", remedy="restore again")
        if report.rank in round.compared:  # a repetition
            return round
        size = -(-report.names // 8)
        if report.unused and not len(report.unused) == len(round.unused or report.unused) == size:
            what = f"rank {report.rank} has found other names in version {report.entry.id} than other ranks"
            self._fail(round, ClusterError(what))
            return round
        now = self._clock.monotonic()
        round.deadline = now + report.timeout
        round.advance(now)
        if not report.unused:
            round.uses_all(report.rank)
        else:
            before = report.unused if round.unused is None else round.unused
            both = int.from_bytes(before, "little") & int.from_bytes(report.unused, "little")
            round.unused = both.to_bytes(len(before), "little")
            round.compared.add(report.rank)  # last: ranks can be answered now
        self.changes += 1
        return round

    def restored(self) -> list[RestoreInfo]:
        """The restores that have succeeded since the last call."""
        found, self._restored = self._restored, []
        return found

    def reading(self, rank: RankReading) -> None:
        """A rank reads on: the others wait for it."""
        member, round = (rank.incarnation, rank.number), self.open_round
        if round is None or round.members.get(rank.rank, member) != member or rank.rank in round.votes:
            return
        now = self._clock.monotonic()
        if rank.quiet:
            round.stalls[rank.rank], round.warn_at = (now - rank.quiet, rank.source), now
        else:
            round.stalls.pop(rank.rank, None)
            round.heard[rank.rank] = now
            round.deadline = max(round.deadline, now + rank.timeout)

    def left(self, rank: int, incarnation: Incarnation) -> None:
        """A new process has taken a rank: the round of its previous process fails."""
        if any(missed.members.get(rank, (incarnation,))[0] != incarnation for _, missed in self._missed.values()):
            self._missed.clear()  # the training was restarted
        round = self.open_round
        if round is not None and rank in round.members and round.members[rank][0] != incarnation:
            self._fail(round, RankRestarted(f"{member_text(rank)} was restarted during the restore", remedy="restore again"))

    def give_up(self, error: RaystowError) -> None:
        """Fail the round: the repository was deleted, or another one has taken its place."""
        if self.open_round is not None:
            self._fail(self.open_round, error)

    def tick(self) -> None:
        """Fail the round if it is past its deadline, or warn of ranks that are late."""
        round, now = self.open_round, self._clock.monotonic()
        if round is not None and now > round.deadline:
            self._expire(round, now)
        elif round is not None and now >= round.warn_at:
            self._look_for_late(round, now)

    def _missed_by(self, vote: RestoreVote) -> RestoreRound | None:
        """The round that has failed without a rank, which comes now; None if it begins another one: a process that has started
        since may be of a restarted training, and waits for the others, with a warning."""
        process, missed = self._missed.get(vote.rank, (None, None))
        if missed is None or self.open_round is not None or process != vote.incarnation:
            return None
        del self._missed[vote.rank]
        self._ended[vote.rank] = (vote.incarnation, vote.number), missed
        return missed

    def _member_of(self, round: RestoreRound, rank: int) -> Incarnation | None:
        return round.members[rank][0] if rank in round.members else self._member(rank)

    def _look_for_late(self, round: RestoreRound, now: float) -> None:
        """Warn of ranks that have not called restore, or that read nothing, while others wait."""
        waiting, late, since, source = round.reported, round.missing_ranks, round.begun, ""
        if round.reads:
            pauses = {rank: pause for rank, pause in round.pauses().items() if rank in round.stalls or now - pause[0] >= LATE}
            late = {*pauses}
            since, source = min(pauses.values(), default=(now, ""))
        if not late or not waiting:
            return
        what = f"{'read nothing' if round.reads else 'not called restore'} for {now - since:.0f} s{_from(source)}"
        self._warn(round, late_text(late, waiting, what, lambda rank: self._member_of(round, rank)), min(waiting))
        round.warn_at = next_warning(now, since)

    def _warn(self, round: RestoreRound, text: str, to: int) -> None:
        round.warnings += 1
        round.warning = RanksWarning(round.warnings, text, to)
        self.changes += 1
        about(logger, repository=self._repository.uri).warning("restore: %s", text)

    def _expire(self, round: RestoreRound, now: float) -> None:
        """Fail a round: tell who has not restored, and that the others have given up. A rank that has joined and reads nothing is
        reported so itself."""
        missing, pauses = round.missing_ranks, round.pauses()
        has = "has" if len(missing) == 1 else "have"
        who = with_processes(missing, lambda rank: self._member_of(round, rank))
        quiet = {rank: f"read nothing for {now - pauses[rank][0]:.0f} s{_from(pauses[rank][1])}" for rank in missing}
        if round.reads:
            entry = round.candidates[0]
            states = "".join(f"; {member_text(rank)} has {quiet[rank]}" for rank in sorted(missing)[:_LISTED])
            what = f"{who} {has} not restored version {entry.id} (step {entry.step}){states}"
        else:
            what = f"{who} {has} not called restore for {now - round.begun:.0f} s"
        at = datetime.fromtimestamp(self._clock.now(), timezone.utc)
        gave_up = f"; {ranks_text(round.reported)} gave up at {at:%H:%M:%S} UTC" if round.reported else ""
        self._fail(round, _overdue(f"{what}{gave_up}"))
        for rank in missing & round.members.keys():
            own = replace(round, failure=_overdue(f"{member_text(rank)} (this rank) has {quiet[rank]}{gave_up}"))
            self._ended[rank] = round.members[rank], own

    def _round_of(self, vote: RestoreVote, held: RestoreChoice | None) -> RestoreRound:
        if (round := self.open_round) is not None:
            member = vote.incarnation, vote.number
            what = f"{member_text(vote.rank)} has begun another restore"
            if not is_part(vote.rank) and round.world_size not in (0, vote.world_size):
                what = f"the world size changed from {round.world_size} to {vote.world_size} during the restore"
            elif round.members.get(vote.rank, member) == member:
                return round
            self._fail(round, ClusterError(what, remedy="restore again"))
            self._missed.clear()  # this rank begins the next round
        root, said = self._known.root()
        ranks = 0 if is_part(vote.rank) else vote.world_size
        round = RestoreRound(ranks, vote.version, list(reversed(root.versions)), 0.0, self._clock.monotonic())
        round.span, round.store_down = Span("restore", vote.trace or ROOT, ranks=ranks), not said
        round.advance(round.begun)
        _, missed = self._missed.pop(vote.rank, (None, None))
        if missed is not None and missed.failure is not None:
            self._warn(round, f"{missed.failure.what}; {ranks_text([vote.rank])} waits for them again", vote.rank)
        self._missed.clear()
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
            self.open_round = round
        else:
            round.failure = round.missing  # an empty repository: there is nothing to agree on
            round.span.end(round.failure or "")
        return round

    def _declare(self, round: RestoreRound, vote: RestoreVote) -> None:
        """Note the world size and the parts of a rank's vote. Raise ``StateError`` for a part that the ranks do not declare, and
        fail a round whose ranks declare different parts."""
        if not is_part(vote.rank):
            parts = frozenset(map(part_number, names_in(vote.parts)))
            others = [rank for rank in round.members if rank != vote.rank and not is_part(rank)]
            if others and round.parts != parts:
                self._fail(round, StateError("ranks declare different parts", remedy="give all ranks the same parts="))
            round.world_size, round.parts = vote.world_size, parts
        elif round.world_size and vote.rank not in round.parts:
            round.members.pop(vote.rank, None)
            remedy = f"pass parts=(..., {name_of(vote.rank)!r}) to the Checkpointer of each rank"
            raise StateError("the ranks do not declare it", subject=member_text(vote.rank), remedy=remedy)

    def _check_asked(self, round: RestoreRound) -> None:
        """Fail a round that all ranks have joined if they ask for different versions, or for one that does not exist."""
        ranks: dict[str, list[int]] = {}
        for rank, version in sorted(round.asked.items()):
            ranks.setdefault(version, []).append(rank)
        if len(ranks) > 1:
            texts = {v: ranks_text(of) if is_part(of[-1]) else f"ranks {_listed(of)}" for v, of in ranks.items()}
            what = ", ".join(f"{version!r} by {text}" for version, text in texts.items())
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
        round.span.end(version=entry.id, step=entry.step)
        self._close(round)

    def _fall_back(self, round: RestoreRound, entry: Entry, damage: dict[int, str]) -> None:
        try:  # a version that was deleted with its repository is not damaged
            self._repository.root()
        except NotARepository as error:
            self._fail(round, error)
            return
        except RaystowError:
            pass  # the lease says so
        texts = "; ".join(f"{member_text(rank)}: {text}" for rank, text in damage.items())
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
        if not round.joined and not isinstance(error, RankRestarted):
            absent = round.everyone - round.members.keys()
            self._missed = {rank: (self._member(rank), round) for rank in absent}
            self._missed_until = self._clock.monotonic() + round.patience

    def _close(self, round: RestoreRound) -> None:
        self.changes += 1
        self._ended.update((rank, (member, round)) for rank, member in round.members.items())
        self.open_round = None
        round.span.end(round.failure or "")
        round.lease.close()
