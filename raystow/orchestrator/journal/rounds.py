"""The agreement of all ranks on the step to replay to. A state of which ranks have different steps is never left."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...storage.errors import ClusterError, DeadlineExceeded, RankRestarted, RaystowError, StateError
from ...storage.runtime.clock import Clock
from ...storage.runtime.spans import NO_SPAN, ROOT, Span
from ...workers.protocol.messages import EntryInfo, Generation, Incarnation, JournalChoice, JournalVote, RankReading
from .entry_plan import EntryPlan, continued, plan_entries

Survey = Callable[[], Mapping[str, Sequence[EntryInfo]]]
"""Asks all nodes for the entries that they have in memory."""


@dataclass
class JournalRound:
    """One replay of all ranks.

    Args:
        votes: What each rank has said last.
        plan: How far to go; None until all ranks have come.
        rollbacks: Those of the repository when the plan was made.
        lineage: Of the entries that follow.
        agreed: All have reached the step of the plan.
        span: From the first vote on until it is over.
    """

    world_size: int
    deadline: float
    votes: dict[int, JournalVote] = field(default_factory=dict)
    plan: EntryPlan | None = None
    rollbacks: int = 0
    lineage: tuple[Generation, ...] = ()
    agreed: bool = False
    failure: RaystowError | None = None
    span: Span = NO_SPAN

    def answers(self, vote: JournalVote) -> bool:
        """Whether a rank can be answered: all have come, and all have reported their step if this rank has."""
        if self.failure is not None or self.agreed:
            return True
        return self.plan is not None and (vote.reached is None or vote.reached > self.plan.step)

    def answer(self, vote: JournalVote) -> JournalChoice:
        """The answer for a rank; raises why the round has failed."""
        if self.failure is not None:
            raise self.failure
        assert self.plan is not None
        entries = tuple(self.plan.entries(vote.rank, self.world_size)) if vote.reached is None else ()
        return JournalChoice(self.plan.step, self.lineage, entries, self.agreed, self.plan.end, self.span.trace)


class JournalRounds:
    """The rounds of one repository. Not thread-safe. ``rollbacks``: how many it has had."""

    def __init__(self, clock: Clock, rollbacks: Callable[[], int] = lambda: 0) -> None:
        self._clock, self._rollbacks = clock, rollbacks
        self._open: JournalRound | None = None
        self._ended: dict[int, JournalRound] = {}  # by rank: the last round that ended
        self.changes = 0
        """The number of changes of all rounds."""

    @property
    def in_use(self) -> bool:
        """Whether a round is open."""
        return self._open is not None

    def vote(self, vote: JournalVote, survey: Survey) -> JournalRound:
        """Take a rank's vote, and look for entries when all ranks have come."""
        ended = self._ended.get(vote.rank)
        if ended is not None and _is_of(vote, ended.votes[vote.rank]):  # the round ended while this rank was busy
            return ended
        round = self._round_of(vote)
        if round.votes.get(vote.rank) == vote:  # repeated, since other ranks replay on
            return round
        round.votes[vote.rank] = vote
        round.deadline = self._clock.monotonic() + vote.timeout
        if vote.error:
            self._fail(round, ClusterError(f"rank {vote.rank} could not replay: {vote.error}", remedy="restore again"))
            return round
        if len(round.votes) < round.world_size:
            return round
        if round.plan is None:
            self._choose(round, survey)
        elif all(one.reached is not None for one in round.votes.values()):
            self._compare(round, round.plan, vote.base)
        return round

    def chooses(self, vote: JournalVote) -> bool:
        """Whether a vote is the last one before entries are looked for."""
        round = self._open
        others = {} if round is None or round.plan is not None else round.votes
        return vote.reached is None and not vote.error and len(others.keys() | {vote.rank}) >= vote.world_size

    def reading(self, rank: RankReading) -> None:
        """A rank replays on, maybe to the step that an earlier coordinator has named: the others wait for it."""
        round = self._open
        vote = None if round is None else round.votes.get(rank.rank)
        if round is not None and (vote is None or (_is_of(rank, vote) and round.answers(vote))):
            round.deadline = max(round.deadline, self._clock.monotonic() + rank.timeout)

    def left(self, rank: int, incarnation: Incarnation) -> None:
        """A new process has taken a rank: the round of its previous process fails."""
        round = self._open
        if round is not None and rank in round.votes and round.votes[rank].incarnation != incarnation:
            self._fail(round, ClusterError(f"rank {rank} was restarted during the replay", remedy="restore again"))

    def tick(self) -> None:
        """Fail the round if it is past its deadline."""
        round = self._open
        if round is not None and self._clock.monotonic() > round.deadline:
            missing = sorted({*range(round.world_size)} - round.votes.keys())
            busy = sorted(rank for rank, vote in round.votes.items() if round.answers(vote))
            what = f"ranks {missing[:8]} did not call replay" if missing else f"ranks {busy[:8]} did not go on with their replay"
            self._fail(round, DeadlineExceeded(what, subject="replay of the journal"))

    def _round_of(self, vote: JournalVote) -> JournalRound:
        round = self._open
        if round is not None and vote.rank in round.votes and not _is_of(vote, round.votes[vote.rank]):
            self._fail(round, ClusterError(f"rank {vote.rank} was restarted during the replay", remedy="restore again"))
            round = None
        if vote.reached is not None and (round is None or vote.rank not in round.votes):  # by another plan, maybe
            error: ClusterError = RankRestarted("the coordinator was restarted during the replay", remedy="restore again")
            if round is not None and round.world_size != vote.world_size:
                error = ClusterError(f"{round.world_size} ranks have begun another replay", remedy="restore again")
            return JournalRound(vote.world_size, 0.0, failure=error)
        if round is None or round.world_size != vote.world_size:
            if round is not None:
                self._fail(round, ClusterError(f"{vote.world_size} ranks have begun another replay", remedy="restore again"))
            span = Span("replay", vote.trace or ROOT, ranks=vote.world_size, version_step=vote.base)
            self._open = round = JournalRound(vote.world_size, 0.0, span=span)
        return round

    def _choose(self, round: JournalRound, survey: Survey) -> None:
        bases = {vote.base for vote in round.votes.values()}
        if len(bases) > 1:
            what = f"ranks have restored different steps: {sorted(bases)}"
            self._fail(round, StateError(what, subject="replay of the journal", remedy="restore with one Checkpointer each"))
            return
        (base,) = bases
        nothing = any(vote.nothing for vote in round.votes.values())
        fixed = next((vote.fixed for vote in round.votes.values() if vote.fixed), "")
        round.rollbacks = self._rollbacks()
        held = {} if nothing else survey()
        round.plan = plan_entries(base, round.world_size, held, fixed, rollbacks=round.rollbacks)
        self.changes += 1

    def _compare(self, round: JournalRound, plan: EntryPlan, base: int) -> None:
        """All have reported their step: agree, or go back to the step that all have reached."""
        reached = {vote.reached for vote in round.votes.values() if vote.reached is not None}
        step = min(reached)
        if step < plan.step:  # the rank that got no further has said why
            plan = plan._replace(end="")
        differing = _first_residue(list(round.votes.values()))
        if differing is not None and (first := plan.steps[differing][0].info).step <= step:
            step = first.previous
            plan = plan._replace(end=f"after step {first.step}, shards of several ranks together differ from the recorded ones")
        round.agreed = reached == {step}
        round.plan = plan._replace(step=step)
        self.changes += 1
        if round.agreed:
            round.lineage = continued(plan, base, step, self._clock, round.rollbacks)
            round.plan = round.plan._replace(steps=())  # only for the first answers
            self._close(round)

    def _fail(self, round: JournalRound, error: RaystowError) -> None:
        round.failure = error
        self._close(round)

    def _close(self, round: JournalRound) -> None:
        self.changes += 1
        self._open = None
        round.span.end(round.failure or "")
        self._ended.update(dict.fromkeys(round.votes, round))


def _is_of(one: JournalVote | RankReading, vote: JournalVote) -> bool:
    """Whether both are of one replay of one process."""
    return (one.incarnation, one.number) == (vote.incarnation, vote.number)


def _first_residue(votes: Sequence[JournalVote]) -> int | None:
    """The number of the first step whose residues do not add up to 0; None if all do, as far as all ranks have come."""
    sums = [sum(column) for column in zip(*(array("Q", vote.residues) for vote in votes), strict=False)]
    return next((number for number, total in enumerate(sums) if total % (1 << 64)), None)
