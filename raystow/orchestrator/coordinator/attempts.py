"""The state machine of the coordinator: gathers reports of ranks and nodes, and makes versions of complete attempts.

No call waits, and none uses the store. Each call reports an event; callers that wait check ``phase``. The state is lost with the
process: a restarted coordinator takes a new epoch and starts from the repository.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...storage.commit.committer import Committer
from ...storage.errors import Fenced, NotARepository, OutcomeUnknown, RaystowError, SaveFailed
from ...storage.format.parts import is_name, is_part, names_in
from ...storage.format.rank_spans import member_text, ranks_text
from ...storage.format.root import Entry
from ...storage.format.version_record import FragmentInfo, RestoreInfo, VersionRecord, check_part, check_restore
from ...storage.limits import MAX_PARTS
from ...storage.log import Log, about
from ...storage.runtime.clock import Clock
from ...storage.runtime.metrics import ABORTED, RAW, STORED, VERSIONS, record
from ...workers.protocol.messages import (
    AskNextSave,
    Begin,
    NextSave,
    RanksWarning,
    ReplicaAnswer,
    ReplicaQuestions,
    RestoreVote,
    Ticket,
)
from ...workers.protocol.messages.coordinator import Incarnation, RankSaveRequest
from ..late_ranks import LATE, next_warning
from .attempt import ANOTHER_RUN, UNSTORED, Attempt, Phase, version_record
from .delta_schedule import DeltaGroup, after
from .lapsed_saves import LapsedSaves
from .membership import MemberMessage, Membership
from .missed_saves import MissedSaves
from .part_saves import PartSaves
from .placement_check import PlacementCheck
from .replica_reports import ReplicaReports
from .save_costs import SaveCosts
from .save_schedule import SaveSchedule

logger = logging.getLogger(__name__)

MOST_OPEN = 1024  # saves of a run that may be open at a time: each call looks at all of them
_RESTORES = 16  # restores that the next version reports


class Coordinator:
    """Not thread-safe. ``writer``: names and versions of the software for version records. ``notices``: for the next save."""

    def __init__(self, committer: Committer, clock: Clock, *, writer: dict[str, str]) -> None:
        self._committer, self._clock, self._writer = committer, clock, writer
        self.members = Membership(committer.catalog, self._taken)
        self._plain_tensors: dict[int, tuple[str, ...]] = {}  # rank -> those of its newest save
        self._metrics_differ, self._lapsed = False, LapsedSaves()
        self._attempts: dict[str, Attempt] = {}
        self._restores: tuple[RestoreInfo, ...] = ()  # not reported by a version yet
        self._group: DeltaGroup | None = None  # of the newest whole version
        self._lost: VersionRecord | None = None  # of the newest attempt that was aborted after all was staged
        self._missed, self._replicas, self.notices = MissedSaves(), ReplicaReports(committer.catalog.uri), list[str]()
        self.schedule, self.costs, self.parts = SaveSchedule(clock), SaveCosts(clock.now()), PartSaves(clock)
        self.changes = 0
        """The number of phase changes of all attempts."""
        self.aborted_in_a_row = 0
        """Attempts aborted since the newest version."""

    @property
    def attempts(self) -> list[Attempt]:
        """The open attempts, and the newest of those that are over."""
        return list(self._attempts.values())

    @property
    def in_use(self) -> bool:
        """Whether an attempt is open, or a save that is not a version may be restored from memory: see ``held``."""
        return self._lost is not None or bool(self._open(*Phase))

    @property
    def nodes(self) -> set[str]:
        """The nodes of all open attempts."""
        return {node for attempt in self._open(*Phase) for node in attempt.nodes}

    @property
    def bases(self) -> set[int]:
        """Ids of the versions that open and future saves may be deltas to. They must not be dropped."""
        named = {attempt.base.id for attempt in self._open(*Phase) if attempt.base is not None}
        return named if self._group is None else named | {self._group.whole.id}

    def join(self, rank: int, incarnation: Incarnation, world_size: int | None = None) -> None:
        """A process has taken a rank or part. Attempts that wait for its previous process are aborted; those of the new
        generation continue while its other ranks join."""
        self.members.join(rank, incarnation, world_size)

    def _taken(self, rank: int, previous: Incarnation | None) -> None:
        self._missed.forget(rank)
        if is_part(rank):
            self.parts.joined(rank)
            self.changes += 1  # the process before it may wait
        for attempt in self._open(Phase.GATHERING):
            missing = previous is not None and not is_part(rank) and attempt.generation < self.members.generation
            if rank not in attempt.delivered and (rank in attempt.ranks or missing):
                self._abort(attempt, f"{member_text(rank)} was restarted")
            elif attempt.generation < self.members.generation and (parts := self.parts.taken_since(attempt)):
                self._abort(attempt, f"ranks and {member_text(parts[0])} were restarted")  # that process has another past

    def restores(self, vote: RestoreVote, *, exists: bool) -> None:
        """A rank or part restores: what waits for it and is of another past is aborted; see ``LapsedSaves.restores``."""
        for attempt in self._lapsed.restores(vote, self._open(*Phase), self.members.generation, exists=exists):
            self._abort(attempt, f"{member_text(vote.rank)} restores, and had not begun to save this step")

    def check_member(self, message: MemberMessage) -> None:
        """See ``Membership.check``."""
        self.members.check(message)

    def next_save(self, ask: AskNextSave) -> NextSave:
        """A rank asks when to save. All ranks that ask for the same step get the same answer."""
        self.check_member(ask)
        return self.schedule.next(ask, self.costs.interval(ask, ask.world_size, self._clock.now()))

    def begin(self, begin: Begin) -> Ticket:
        """A rank starts to save a step. Returns the ticket of its attempt, which the first rank opens."""
        request, rank, plain_tensors = begin.request, begin.request.rank, begin.contents.plain_tensors
        self.check_member(request)
        for attempt in self._open(Phase.GATHERING):
            if attempt.world_size != request.world_size:
                self._abort(attempt, f"the world size changed from {attempt.world_size} to {request.world_size}")
            elif attempt.delivered.get(rank, request.incarnation) != request.incarnation:
                self._abort(attempt, f"rank {rank} was restarted")  # not complete yet: a node worker has died, too
        self._abort_skipped(request)
        attempt = self._joinable(request, self._open(Phase.GATHERING)) or self._new(request)
        if rank not in attempt.ranks:
            self._plain_tensors[rank] = plain_tensors or self._plain_tensors.get(rank, ())
        if unlike := attempt.unlike(request):
            self._abort(attempt, unlike)
        ticket = self._admit(attempt, begin)
        attempt.warn_first(self.notices, rank)
        self._abort_if_missed(attempt)
        if unrelated := attempt.add_owned(rank, begin.contents.owned_dtensors):
            self._abort(attempt, unrelated)
        return ticket

    def begin_part(self, begin: Begin) -> Ticket | None:
        """A part starts to save a step. Returns the ticket of its attempt; None until the first rank has opened it. Raises
        ``SaveFailed`` if no rank will."""
        request = begin.request
        self.check_member(request)
        self._lapsed.check(request)
        gathering = self._open(Phase.GATHERING)
        for attempt in gathering:
            if attempt.delivered.get(request.rank, request.incarnation) != request.incarnation:
                self._abort(attempt, f"{member_text(request.rank)} was restarted")  # its node worker has died, too
        if (found := self._joinable(request, gathering)) is None:
            self.parts.check(request, self.attempts, self.members.generation)
            return None
        self.parts.joins(request, found)
        return self._admit(found, begin)

    def next_cut(self, ask: AskNextSave) -> NextSave | None:
        """A part asks for the save that the ranks begin; None if none has begun."""
        self.check_member(ask)
        for attempt in self.parts.skipped(ask, self.attempts):
            self._abort(attempt, f"{member_text(ask.rank)} waits for step {ask.first}, and has not saved this one")
        return self.parts.next(ask, self.attempts)

    def _admit(self, attempt: Attempt, begin: Begin) -> Ticket:
        """Add a rank or part to an attempt, once, and return its ticket."""
        now = self._clock.monotonic()
        if begin.request.rank not in attempt.ranks:
            attempt.join(begin, now)
            if attempt.parts:
                self.changes += 1  # parts that wait can begin
        adds_nothing = is_part(begin.request.rank) and begin.node in attempt.nodes  # to the record
        number = attempt.nodes.setdefault(begin.node, len(attempt.nodes))
        if not adds_nothing and (too_large := attempt.too_large) is not None:
            self._abort(attempt, too_large)
        left, about_base = max(0.0, attempt.deadline - now), (attempt.base, attempt.deltas)
        return Ticket(attempt.id, attempt.attempt, number, left, attempt.step, *about_base, attempt.span.trace)

    def finished(self, ticket: Ticket, rank: int, covered: int, digests: Sequence[tuple[int, int]] = ()) -> None:
        """All shards of a rank are coded on its node. ``digests``: see ``RankFinished``."""
        attempt = self._of(ticket, Phase.GATHERING)
        if rank not in attempt.covered:
            attempt.comparison.note(rank, digests)
        attempt.covered[rank], attempt.progress = covered, self._clock.monotonic()
        if len(attempt.covered) < attempt.world_size + len(attempt.parts):
            return
        if isinstance(why := attempt.incomplete(self._plain_tensors), PlacementCheck):
            attempt.placement, attempt.comparison.begun = why, self._clock.monotonic()
        elif why:
            self._abort(attempt, why)
            return
        else:
            self._metrics_differ = self._metrics_differ or attempt.warn_of_metrics()  # said once: they may differ in each save
            attempt.comparison.begin(self._clock.monotonic())
        if attempt.inquiry.is_open:
            self._enter(attempt, Phase.COMPARING)
        else:
            self._compared(attempt)

    def questions(self, ticket: Ticket) -> ReplicaQuestions | None:
        """What a node has to answer, so that it is known what differs between ranks."""
        asked = attempt.questions(ticket.node) if (attempt := self.find(ticket.attempt)) is not None else ()
        return ReplicaQuestions(asked) if asked else None

    def answered(self, ticket: Ticket, answers: Sequence[ReplicaAnswer]) -> None:
        """A node may have answered. It sends its answers again while it waits for others."""
        attempt = self.attempt(ticket)
        if not answers or attempt.phase is not Phase.COMPARING:
            return
        attempt.inquiry.take(answers)
        self.changes += 1  # nodes that wait may be asked
        if not attempt.inquiry.is_open:
            self._compared(attempt)

    def _compared(self, attempt: Attempt) -> None:
        """Go on: it is known what differs between ranks."""
        if (failure := attempt.misplaced or self._replicas.report(attempt)) is not None:
            self._abort(attempt, failure)
        else:
            self._enter(attempt, Phase.SEALING)

    def staged(self, ticket: Ticket, info: FragmentInfo) -> None:
        """A node's packs and fragment are complete in memory, and being uploaded."""
        attempt = self._of(ticket, Phase.SEALING)
        if ticket.node in attempt.staged:
            return  # reported before; the answer was lost
        self._check_part(attempt, ticket, info)
        attempt.staged[ticket.node] = info
        if len(attempt.staged) == len(attempt.nodes):
            attempt.created = self._clock.now()
            attempt.restores, self._restores = self._restores, ()

    def restored(self, restores: Sequence[RestoreInfo]) -> None:
        """The run has restored versions; its next version reports them."""
        for restore in restores:
            try:
                check_restore(restore)
                self._restores = (*self._restores, restore)[-_RESTORES:]
            except RaystowError as error:  # in a record it would fail this and each later save
                logger.warning("no version will report a restore of version %d: %s", restore.version, error)
        self.costs.restored(restores)

    def held(self) -> list[VersionRecord]:
        """The records of attempts that are not versions but were staged completely, so they may be in memory. Newest first; of
        aborted attempts only the newest, until a newer one is a version."""
        staged = [self._promise(attempt) for attempt in self._open(Phase.SEALING, Phase.READY) if attempt.created]
        staged += [self._lost] if self._lost is not None else []
        return sorted(staged, key=lambda record: record.id, reverse=True)

    def fragment(self, ticket: Ticket, info: FragmentInfo) -> None:
        """A node's packs and fragment are durable."""
        attempt = self.attempt(ticket)
        if attempt.phase is Phase.COMMITTED or ticket.node in attempt.stored:
            return  # reported before; the answer was lost
        attempt = self._of(ticket, Phase.SEALING)
        if (known := attempt.staged.get(ticket.node)) != info:
            self._check_part(attempt, ticket, info)
        attempt.stored[ticket.node], attempt.progress = known if known == info else info, self._clock.monotonic()
        if len(attempt.stored) == len(attempt.nodes):
            self._enter(attempt, Phase.READY)

    def failed(self, ticket: Ticket, reason: str) -> None:
        """A node cannot complete its part. If it need not, the attempt may be a version by now."""
        if (attempt := self.find(ticket.attempt)) is not None and attempt.needs(ticket.node):
            self._abort(attempt, reason)

    def save_failed(self, rank: int, incarnation: Incarnation, save: int, step: int, reason: str) -> bool:
        """A save of a rank has failed. Its attempt is aborted, and any other attempt that would wait for it until its deadline,
        also one that another rank opens later. Returns whether this rank reports it first, and so logs it for all."""
        try:
            self.members.assume(rank, incarnation)
        except NotARepository:
            return True
        if self.members.get(rank) != incarnation:
            return True
        first = self._missed.note(rank, save, step, reason)
        for attempt in self._open(*UNSTORED):
            if attempt.step == step and attempt.saves.get(rank) == save:
                if attempt.needs(attempt.nodes[attempt.ranks[rank]]):
                    self._abort(attempt, reason)
            else:
                self._abort_if_missed(attempt)
        return first

    def rank_disconnected(self, rank: int, incarnation: Incarnation, reason: str) -> None:
        """The process of a rank has ended, or connects again. Its node worker has all of the saves that it has begun and not
        reported as failed: they still count."""
        if self.members.get(rank) == incarnation:
            for attempt in self._open(Phase.GATHERING):
                if rank in attempt.ranks:
                    attempt.delivered[rank] = incarnation
                elif not is_part(rank) or rank in attempt.parts:
                    self._abort(attempt, reason)

    def nodes_alive(self, alive: set[str]) -> None:
        """Abort the attempts that need a node which is not alive."""
        for attempt in self._open(*UNSTORED):
            for node, number in attempt.nodes.items():
                if node not in alive and number not in attempt.stored:
                    ranks = sorted(rank for rank, home in attempt.ranks.items() if home == node)
                    who = ranks_text(ranks) if is_part(ranks[-1]) else f"ranks {ranks}"
                    self._abort(attempt, f"node {node} died with the shards of {who}")
                    break

    def tick(self) -> None:
        """Abort the attempts that are past their deadline; the reason names the missing ranks, parts or nodes."""
        now = self._clock.monotonic()
        self.changes += self.parts.tick()
        for attempt in self._open(*UNSTORED):
            if now < attempt.deadline:
                self._look_for_late(attempt, now)
                if attempt.phase is Phase.COMPARING and now > attempt.comparison.begun + LATE:
                    self._compared(attempt)
                continue
            self._abort(attempt, attempt.overdue)

    def late(self, ticket: Ticket, last_warning: int) -> RanksWarning | None:
        """The warning of late ranks that a node has to log, after number ``last_warning``."""
        return attempt.warning_after(last_warning, ticket.node) if (attempt := self.find(ticket.attempt)) is not None else None

    def _look_for_late(self, attempt: Attempt, now: float) -> None:
        if now < attempt.warn_at:
            return
        if (warning := attempt.late(self.members.get, now)) is None:
            attempt.warn_at = max(attempt.progress, now - attempt.patience + 1) + attempt.patience
            return
        attempt.warn_at = next_warning(now, attempt.opened)
        self.changes += 1
        self._log(attempt).warning("save of step %d: %s", attempt.step, warning.text)

    def next_commit(self) -> Attempt | None:
        """The attempt to commit now: it is complete, and no older one is open, so versions have the order of saves."""
        oldest = min((a for a in self._attempts.values() if not a.phase.over), key=lambda a: a.id, default=None)
        return oldest if oldest is not None and oldest.phase is Phase.READY else None

    def record(self, attempt: Attempt) -> VersionRecord:
        """The record that makes a complete attempt a version. Commit it, then call ``settled``."""
        results = attempt.stored if attempt.phase is Phase.READY else attempt.staged
        created = attempt.created or self._clock.now()
        return version_record(self._committer, attempt, results, created=created, writer=self._writer)

    def settled(self, attempt: Attempt, outcome: Entry | RaystowError) -> None:
        """Note the result of a commit: the root's entry, or the error."""
        if isinstance(outcome, Entry):
            attempt.entry = outcome
            took, cold = self._clock.monotonic() - attempt.opened, 1 in attempt.saves.values()
            self.costs.saved(attempt.stall, took, cold=cold)
            if not (attempt.deltas and outcome.bases):
                self._group = after(self._group, outcome, attempt.base if attempt.deltas else None)
            elif self._group is not None:
                self._group = self._group.with_delta(outcome)
            self.aborted_in_a_row = 0
            self._enter(attempt, Phase.COMMITTED)
            for metric, number in ((VERSIONS, 1), (RAW, outcome.raw), (STORED, outcome.stored)):
                record(metric, number, repository=self._committer.catalog.uri)
            if self._lost is not None and self._lost.id < attempt.id:
                self._lost = None
            fields = (outcome.id, outcome.step, outcome.stored, outcome.raw)
            self._log(attempt).info("version %d, step %d: %d bytes stored of %d", *fields)
            return
        if isinstance(outcome, Fenced):
            self._group = None
            for other in self._open(*Phase):
                self._abort(other, self._fenced(attempt, outcome))
            return
        if isinstance(outcome, NotARepository):
            self.give_up(outcome)
        elif isinstance(outcome, OutcomeUnknown):
            self._abort(attempt, OutcomeUnknown(outcome.what, subject=attempt.subject, remedy=outcome.remedy))
        else:
            self._abort(attempt, f"the commit failed: {outcome}")
        if self._group is not None and attempt.base == self._group.whole:  # the base may be dropped: the next save is whole
            self._group = None
        # Unless the root refused it, a pending write may still make it a version: its objects must stay until a collection has
        # spent the id.
        attempt.swept = not isinstance(outcome, SaveFailed | NotARepository)

    def give_up(self, error: RaystowError) -> None:
        """End all attempts. If the repository is gone, or another one is there now, forget also what is in memory only."""
        for attempt in self._open(*Phase):
            self._abort(attempt, SaveFailed(f"{error.subject}: {error.what}", subject=attempt.subject, remedy=error.remedy))
        self._lost, self._group = (None if isinstance(error, NotARepository) else self._lost), None

    def _fenced(self, attempt: Attempt, outcome: Fenced) -> RaystowError:
        uri = self._committer.catalog.uri
        if attempt.takes_over or self._committer.replaced:
            return SaveFailed(f"{outcome.what}; this run takes over again", subject=uri, remedy="nothing; later saves go on")
        return Fenced(outcome.what, subject=uri, remedy=ANOTHER_RUN)

    def find(self, attempt: str) -> Attempt | None:
        """The attempt of this name; None if it was before this coordinator started, or is over for long."""
        return self._attempts.get(attempt)

    def attempt(self, ticket: Ticket) -> Attempt:
        """The attempt of a ticket; ``SaveFailed`` if the coordinator was restarted since."""
        if (attempt := self.find(ticket.attempt)) is None:
            raise SaveFailed("the coordinator was restarted during this save", subject=f"attempt {ticket.id}")
        return attempt

    def abandoned(self) -> list[tuple[int, str]]:
        """The attempts aborted since the last call, whose objects may be deleted. Keeps the newest hundred that are over."""
        given_up = [a for a in self._attempts.values() if a.phase is Phase.ABORTED and not a.swept]
        for attempt in given_up:
            attempt.swept = True
        over = [key for key, attempt in self._attempts.items() if attempt.phase.over]
        for key in over[:-100]:
            del self._attempts[key]
        return [(attempt.id, attempt.attempt) for attempt in given_up]

    def _open(self, *phases: Phase) -> list[Attempt]:
        return [a for a in self._attempts.values() if a.phase in phases and not a.phase.over]

    def _joinable(self, request: RankSaveRequest, attempts: Sequence[Attempt]) -> Attempt | None:
        """The oldest attempt for the step that this rank is not part of, so that the saves of all ranks match in order; or the
        one that it joined with the same save, if the call is repeated."""
        rank, save, step = request.rank, request.save, request.step
        open = (attempt for attempt in attempts if attempt.phase is Phase.GATHERING)
        return next((one for one in open if (one.step, one.saves.get(rank, save)) == (step, save)), None)

    def _new(self, request: RankSaveRequest) -> Attempt:
        if len(self._open(*Phase)) >= MOST_OPEN:
            what = f"{MOST_OPEN} saves are open: some ranks begin saves that others do not"
            raise SaveFailed(what, subject=f"save of step {request.step}", remedy="save the same steps on all ranks")
        if len(names := names_in(request.parts)) > MAX_PARTS or not all(map(is_name, names)):
            raise SaveFailed(f"declares invalid parts, or more than {MAX_PARTS}", subject=f"rank {request.rank}")
        id, token = self._committer.reserve()
        now = self._clock.monotonic()
        who = id, token, request.step, request.world_size, now, now + request.timeout
        attempt = self._attempts[token] = Attempt(*who, declared=request.parts)
        attempt.generation, attempt.warn_at = self.members.generation, now + attempt.patience
        if self._group is not None and not self._committer.is_current(self._group.whole.id):
            self._group = None  # its versions may be rolled back: the next one is whole
        if request.delta and self._group is not None:
            attempt.deltas, why = self._group.goes_on(request.delta)
            attempt.base = self._group.base
            if attempt.base is not None and attempt.deltas:
                self._group = self._group.begun()
                why = f"to version {attempt.base.id} where that is smaller, {why}"
            attempt.coding["delta" if attempt.deltas else "whole"] = why
        return attempt

    def _abort_skipped(self, request: RankSaveRequest) -> None:
        """Abort the attempts for which a rank will not come, since it has gone on to another step, before their deadlines. All
        ranks of a generation count their saves alike."""
        for other in self._open(Phase.GATHERING):
            skipped = request.rank not in other.ranks and other.step != request.step and request.save >= other.first_save
            if skipped and self.members.joined(request.rank) == other.generation:
                begun = sorted(rank for rank in other.ranks if not is_part(rank))
                ranks = f"rank{'s' * (len(begun) > 1)} {', '.join(map(str, begun[:8]))}"
                what = f"rank {request.rank} saves step {request.step} where {ranks} saved step {other.step}"
                self._abort(other, f"{what}: all ranks must save the same steps in the same order")

    def _of(self, ticket: Ticket, phase: Phase) -> Attempt:
        attempt = self.attempt(ticket)
        if attempt.phase is not phase:
            raise attempt.failure or SaveFailed(f"the attempt is {attempt.phase.value}", subject=attempt.subject)
        return attempt

    def _check_part(self, attempt: Attempt, ticket: Ticket, info: FragmentInfo) -> None:
        """Abort the attempt, and raise, if readers would refuse what a node reports."""
        try:
            check_part(info, ticket.node, nodes=len(attempt.nodes))
        except RaystowError as error:
            self._abort(attempt, f"node {ticket.node} reported an invalid part: {error.what}")
            raise SaveFailed(attempt.reason, subject=f"save of step {attempt.step}") from error

    def _abort_if_missed(self, attempt: Attempt) -> None:
        """Abort an attempt that waits for a rank whose save of that step has failed."""
        if (reason := self._missed.reason(attempt)) is not None:
            self._abort(attempt, reason)

    def _promise(self, attempt: Attempt) -> VersionRecord:
        """The record that it will have. Made once, since every rank that restores needs it."""
        attempt.promised = attempt.promised or self.record(attempt)
        return attempt.promised

    def _enter(self, attempt: Attempt, phase: Phase) -> None:
        attempt.phase = phase
        self.changes += 1
        if phase.over:
            attempt.end(self._clock.monotonic())

    def _abort(self, attempt: Attempt, why: str | RaystowError) -> None:
        attempt.failure = SaveFailed(why, subject=attempt.subject) if isinstance(why, str) else why
        if attempt.created and (self._lost is None or self._lost.id < attempt.id):
            self._lost = self._promise(attempt)
        self._restores = (*attempt.restores, *self._restores)[-_RESTORES:]
        self._enter(attempt, Phase.ABORTED)
        self.aborted_in_a_row += 1
        record(ABORTED, repository=self._committer.catalog.uri)
        # Not a warning: the first rank that reports the failed save logs that, where the user of the training sees it.
        self._log(attempt).info("the save of step %d was given up: %s", attempt.step, attempt.reason)

    def _log(self, attempt: Attempt) -> Log:
        run = self._committer.catalog.uri
        return about(logger, repository=run, version=attempt.id, attempt=attempt.attempt, step=attempt.step)
