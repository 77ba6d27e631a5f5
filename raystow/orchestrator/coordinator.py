"""The coordinator: gathers what ranks and nodes report, and turns complete attempts into versions. One per repository.

A plain state machine. No call waits, and none talks to the store; each says what has happened, and whoever waits looks at
``phase``. Nothing here outlives the process: a restarted coordinator takes a new epoch and starts from the repository.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..storage.clock import Clock
from ..storage.committer import Committer
from ..storage.errors import Fenced, RaystowError, SaveFailed
from ..storage.format.root import Entry
from ..storage.format.version_record import FragmentInfo, PackInfo, RestoreInfo, VersionRecord
from ..storage.log import Log, about
from ..storage.metrics import ABORTED, RAW, STORED, VERSIONS, record
from ..storage.retention.policy import Policy
from ..workers.port import MODULUS, Begin, Ticket
from .row import Row, after

logger = logging.getLogger(__name__)

_MISSED = 16  # steps of which failed saves are remembered
_RESTORES = 16  # that the next version tells of


class Phase(enum.Enum):
    """Where an attempt stands."""

    GATHERING = "waiting for ranks"
    SEALING = "waiting for manifest fragments"
    READY = "waiting for the commit"
    COMMITTED = "a version"
    ABORTED = "given up"

    @property
    def over(self) -> bool:
        """Whether it will not change any more."""
        return self in (Phase.COMMITTED, Phase.ABORTED)


Part = tuple[FragmentInfo, tuple[PackInfo, ...]]
"""What one node has made: its fragment and its packs."""


@dataclass
class Attempt:
    """One try to make a version. ``ranks``: rank -> the node that serves it. ``saves``: rank -> the number of its save.
    ``vouched``: DTensor -> the first rank of its mesh. ``nodes``: node -> its number here. ``staged`` and ``stored``: what nodes,
    by number, have made, and made durable. ``created``: when all was staged; ``promised``: the record that it will have;
    ``restores``: those that it will tell of. ``base``: what it may be a difference to.
    ``opened``, ``deadline``, ``ended``: monotonic seconds."""

    id: int
    attempt: str
    step: int
    world_size: int
    opened: float
    deadline: float
    phase: Phase = Phase.GATHERING
    reason: str = ""
    metrics: dict[str, object] = field(default_factory=dict)
    coding: dict[str, str] = field(default_factory=dict)
    lossy: dict[str, str] = field(default_factory=dict)
    retention: Policy | None = None
    ranks: dict[int, str] = field(default_factory=dict)
    saves: dict[int, int] = field(default_factory=dict)
    replicated: dict[int, int] = field(default_factory=dict)
    vouched: dict[str, int] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)
    staged: dict[int, Part] = field(default_factory=dict)
    created: float = 0.0
    restores: tuple[RestoreInfo, ...] = ()
    promised: VersionRecord | None = None
    expected: int = 0
    covered: dict[int, int] = field(default_factory=dict)
    stored: dict[int, Part] = field(default_factory=dict)
    entry: Entry | None = None
    swept: bool = False
    generation: int = 0
    base: Entry | None = None
    serves: bool = False
    ended: float = 0.0

    def forget_parts(self) -> None:
        """Let go of all that ranks and nodes have told: of thousands of nodes it is 100 MB, and the newest attempts are kept."""
        told: tuple[dict[Any, Any], ...] = (self.ranks, self.saves, self.replicated, self.vouched, self.nodes, self.covered)
        for parts in (*told, self.staged, self.stored):
            parts.clear()
        self.promised = None


class Coordinator:
    """Not for several threads at once. ``writer`` names the software in version records."""

    def __init__(self, committer: Committer, clock: Clock, *, writer: dict[str, str]) -> None:
        self._committer, self._clock, self._writer = committer, clock, writer
        self._members: dict[int, str] = {}
        self._joined: dict[int, int] = {}  # rank -> generation in which its process joined
        self._missed: dict[int, dict[int, tuple[int, str]]] = {}  # step -> rank -> number of its save that failed there, and why
        self._generation = 0
        self._world_size: int | None = None  # of that generation, once a rank has said
        self._attempts: dict[str, Attempt] = {}
        self._restores: tuple[RestoreInfo, ...] = ()  # that no version tells of yet
        self._row: Row | None = None  # of the newest version that is no difference
        self._lost: VersionRecord | None = None  # of the newest attempt that was given up when all of it was staged
        self.changes = 0
        """How often any attempt has entered another phase: all that anyone waits for."""
        self.aborted_in_a_row = 0
        """Attempts given up since the newest version was made."""

    @property
    def attempts(self) -> list[Attempt]:
        """Those under way, and the newest of those that are over."""
        return list(self._attempts.values())

    @property
    def bases(self) -> set[int]:
        """Ids of the versions that saves may be differences to, those under way and the next: they must stay."""
        named = {attempt.base.id for attempt in self._open(*Phase) if attempt.base is not None}
        return named if self._row is None else named | {self._row.whole.id}

    def join(self, rank: int, incarnation: str, world_size: int | None = None) -> None:
        """A process has taken up a rank. What waits for the rank's former process, or holds a part of it, is given up.

        The first rank that joins a second time, or as one of another number of ranks, begins a new generation. What the new
        generation has opened itself goes on while its other ranks are still joining.
        """
        former = self._members.get(rank)
        if former == incarnation:
            return
        self._members[rank] = incarnation
        for missed in self._missed.values():
            missed.pop(rank, None)
        resized = world_size is not None and self._world_size not in (None, world_size)
        if resized or (former is not None and self._joined[rank] == self._generation):
            self._generation += 1
        self._world_size = world_size or self._world_size
        self._joined[rank] = self._generation
        for attempt in self._open(Phase.GATHERING):
            if rank in attempt.ranks or (former is not None and attempt.generation < self._generation):
                self._abort(attempt, f"rank {rank} was restarted")

    def begin(self, begin: Begin) -> Ticket:
        """A rank has begun to save a step: the attempt it belongs to, opened if it is the first."""
        if begin.rank not in self._members:  # it joined before this coordinator was restarted
            self.join(begin.rank, begin.incarnation, begin.world_size)
        if self._members[begin.rank] != begin.incarnation:
            raise SaveFailed("a newer process has taken up this rank", subject=f"rank {begin.rank}", remedy="let this one end")
        for attempt in self._open(Phase.GATHERING):
            if attempt.world_size != begin.world_size:
                self._abort(attempt, f"the world size changed from {attempt.world_size} to {begin.world_size}")
        attempt = self._joinable(begin) or self._new(begin)
        if begin.rank not in attempt.ranks:
            attempt.ranks[begin.rank], attempt.saves[begin.rank] = begin.node, begin.save
            attempt.replicated[begin.rank] = begin.replicated
            attempt.metrics.update(begin.metrics)
            attempt.coding.update(begin.coding)
            attempt.lossy.update(begin.lossy)
            attempt.retention = begin.retention or attempt.retention
            attempt.expected += begin.expected
            self._vouch(attempt, begin)
        number = attempt.nodes.setdefault(begin.node, len(attempt.nodes))
        self._abort_if_missed(attempt)
        left = max(0.0, attempt.deadline - self._clock.monotonic())
        return Ticket(attempt.id, attempt.attempt, number, left, attempt.step, attempt.base, attempt.serves)

    def finished(self, ticket: Ticket, rank: int, covered: int) -> None:
        """A rank's shards are all coded on its node."""
        attempt = self._of(ticket, Phase.GATHERING)
        attempt.covered[rank] = covered
        if len(attempt.covered) < attempt.world_size:
            return
        odd = [r for r, held in sorted(attempt.replicated.items()) if held != attempt.replicated[0]]
        if odd:
            self._abort(
                attempt,
                f"ranks {odd} hold other plain tensors than rank 0: all ranks must hold the same (names, shapes and dtypes), "
                "since they are stored once; shard what differs as DTensors",
            )
            return
        if (attempt.expected - sum(attempt.covered.values())) % MODULUS:
            self._abort(attempt, "the shards of all ranks do not add up to whole tensors: the ranks disagree on their placements")
            return
        self._enter(attempt, Phase.SEALING)

    def staged(self, ticket: Ticket, info: FragmentInfo, packs: Sequence[PackInfo]) -> None:
        """A node's packs and fragment are made, and on their way to the store."""
        attempt = self._of(ticket, Phase.SEALING)
        attempt.staged[ticket.node] = info, tuple(packs)
        if len(attempt.staged) == len(attempt.nodes):
            attempt.created = self._clock.now()
            attempt.restores, self._restores = self._restores, ()

    def restored(self, restores: Sequence[RestoreInfo]) -> None:
        """The run has restored versions: its next version tells of it."""
        self._restores = (*self._restores, *restores)[-_RESTORES:]

    def held(self) -> list[VersionRecord]:
        """What the records are, or would have been, of attempts that are no versions, but of which all was staged: it may be in
        memory. The newest first; of those that were given up only the newest, until a newer one is a version."""
        staged = [self._promise(attempt) for attempt in self._open(Phase.SEALING, Phase.READY) if attempt.created]
        staged += [self._lost] if self._lost is not None else []
        return sorted(staged, key=lambda record: record.id, reverse=True)

    def fragment(self, ticket: Ticket, info: FragmentInfo, packs: Sequence[PackInfo]) -> None:
        """A node's packs and fragment are durable."""
        attempt = self.attempt(ticket)
        if attempt.phase is Phase.COMMITTED or ticket.node in attempt.stored:
            return  # said before; the answer was lost
        attempt = self._of(ticket, Phase.SEALING)
        attempt.stored[ticket.node] = info, tuple(packs)
        if len(attempt.stored) == len(attempt.nodes):
            self._enter(attempt, Phase.READY)

    def failed(self, ticket: Ticket, reason: str) -> None:
        """A node cannot do its part."""
        attempt = self._attempts.get(ticket.attempt)
        if attempt is not None and not attempt.phase.over:
            self._abort(attempt, reason)

    def save_failed(self, rank: int, incarnation: str, save: int, step: int, reason: str) -> None:
        """The training process of a rank has lost a save: the attempt that it is part of is over, and so is any that would wait
        for it, also one that another rank opens later. Without this, they would wait until their deadline."""
        if rank not in self._members:
            self.join(rank, incarnation)
        if self._members[rank] != incarnation:
            return
        self._missed.setdefault(step, {})[rank] = save, reason
        if len(self._missed) > _MISSED:
            del self._missed[next(iter(self._missed))]
        for attempt in self._open(Phase.GATHERING, Phase.SEALING):
            if attempt.step == step and attempt.saves.get(rank) == save:
                self._abort(attempt, reason)
            else:
                self._abort_if_missed(attempt)

    def gone(self, rank: int, incarnation: str, reason: str) -> None:
        """The process of a rank has ended. What it had handed over by then still counts."""
        if self._members.get(rank) == incarnation:
            for attempt in self._open(Phase.GATHERING):
                if rank not in attempt.ranks:
                    self._abort(attempt, reason)

    def nodes_alive(self, alive: set[str]) -> None:
        """Give up the attempts that need a node which is no longer among the living."""
        for attempt in self._open(Phase.GATHERING, Phase.SEALING):
            for node, number in attempt.nodes.items():
                if node not in alive and number not in attempt.stored:
                    self._abort(attempt, f"node {node} died with the shards of ranks {_of_node(attempt, node)}")
                    break

    def tick(self) -> None:
        """Give up the attempts that are past their deadline, by the names of those that are missing."""
        now = self._clock.monotonic()
        for attempt in self._open(Phase.GATHERING, Phase.SEALING):
            if now < attempt.deadline:
                continue
            seconds = attempt.deadline - attempt.opened
            if attempt.phase is Phase.GATHERING:
                missing = sorted(set(range(attempt.world_size)) - set(attempt.covered))
                self._abort(attempt, f"ranks {missing} had not delivered their shards after {seconds:.0f} s")
            else:
                late = sorted(node for node, number in attempt.nodes.items() if number not in attempt.stored)
                self._abort(attempt, f"nodes {late} had not stored their shards after {seconds:.0f} s")

    def next_commit(self) -> Attempt | None:
        """The attempt to commit now: complete, and no older one still open, so that versions come in the order of saves."""
        oldest = min((a for a in self._attempts.values() if not a.phase.over), key=lambda a: a.id, default=None)
        return oldest if oldest is not None and oldest.phase is Phase.READY else None

    def record(self, attempt: Attempt) -> VersionRecord:
        """The record that makes a complete attempt a version; commit it, then tell ``settled``."""
        parts = sorted((attempt.stored if attempt.phase is Phase.READY else attempt.staged).items())
        return VersionRecord(
            repository=self._committer.repository.id,
            id=attempt.id,
            attempt=attempt.attempt,
            epoch=self._committer.epoch,
            step=attempt.step,
            created=attempt.created or self._clock.now(),
            world_size=attempt.world_size,
            metrics=attempt.metrics,
            coding=attempt.coding,
            lossy=attempt.lossy,
            writer=self._writer,
            fragments=tuple(info for _, (info, _) in parts),
            packs=tuple(pack for _, (_, packs) in parts for pack in packs),
            restores=attempt.restores,
        )

    def settled(self, attempt: Attempt, outcome: Entry | RaystowError) -> None:
        """What the commit of an attempt came to: the root's entry, or why there is none."""
        if isinstance(outcome, Entry):
            attempt.entry = outcome
            if not outcome.bases:
                self._row = after(self._row, outcome, attempt.base)
            elif self._row is not None:
                self._row = self._row.difference(outcome)
            self.aborted_in_a_row = 0
            self._enter(attempt, Phase.COMMITTED)
            self._measure(outcome)
            if self._lost is not None and self._lost.id < attempt.id:
                self._lost = None
            told = (outcome.id, outcome.step, outcome.stored, outcome.raw)
            self._log(attempt).info("version %d, step %d: %d bytes stored of %d", *told)
            return
        if isinstance(outcome, Fenced):
            for other in self._open(*Phase):
                self._abort(other, str(outcome))
            return
        self._abort(attempt, f"the commit failed: {outcome}")
        if self._row is not None and attempt.base == self._row.whole:  # it may be gone: the next save is whole
            self._row = None
        # Unless the root said no, a write still under way may make it a version all the same: its objects must stay until a
        # collection has spent the id.
        attempt.swept = not isinstance(outcome, SaveFailed)

    def attempt(self, ticket: Ticket) -> Attempt:
        """The attempt of a ticket; ``SaveFailed`` if this coordinator does not know it (it was restarted since)."""
        attempt = self._attempts.get(ticket.attempt)
        if attempt is None:
            raise SaveFailed("the coordinator was restarted during this save", subject=f"attempt {ticket.id}")
        return attempt

    def abandoned(self) -> list[tuple[int, str]]:
        """The attempts given up since the last call, whose objects may go. Forgets what is over, but for the newest hundred."""
        given_up = [a for a in self._attempts.values() if a.phase is Phase.ABORTED and not a.swept]
        for attempt in given_up:
            attempt.swept = True
        over = [key for key, attempt in self._attempts.items() if attempt.phase.over]
        for key in over[:-100]:
            del self._attempts[key]
        return [(attempt.id, attempt.attempt) for attempt in given_up]

    def _open(self, *phases: Phase) -> list[Attempt]:
        return [a for a in self._attempts.values() if a.phase in phases and not a.phase.over]

    def _joinable(self, begin: Begin) -> Attempt | None:
        """The oldest attempt for the step that this rank is not part of, so that a rank's saves match the others' in their order;
        or the one that it is part of with this very save, if it asks twice."""
        for attempt in self._open(Phase.GATHERING):
            if attempt.step == begin.step and attempt.saves.get(begin.rank, begin.save) == begin.save:
                return attempt
        return None

    def _new(self, begin: Begin) -> Attempt:
        id, token = self._committer.reserve()
        now = self._clock.monotonic()
        attempt = self._attempts[token] = Attempt(id, token, begin.step, begin.world_size, now, now + begin.timeout)
        attempt.generation = self._generation
        if begin.delta and self._row is not None:
            goes_on, why = self._row.goes_on(begin.delta)
            if goes_on:
                attempt.base, self._row = self._row.whole, self._row.begun()
                why = f"to version {attempt.base.id} where that is smaller, {why}"
            attempt.coding["difference" if goes_on else "whole"] = why
        attempt.serves = bool(begin.delta) and (self._row is None or self._row.begins(begin.delta, attempt.base))
        return attempt

    def _of(self, ticket: Ticket, phase: Phase) -> Attempt:
        attempt = self.attempt(ticket)
        if attempt.phase is not phase:
            raise SaveFailed(attempt.reason or f"the attempt is {attempt.phase.value}", subject=f"save of step {attempt.step}")
        return attempt

    def _vouch(self, attempt: Attempt, begin: Begin) -> None:
        """One mesh for each DTensor: two that do not know of each other would both store all of it."""
        for name in begin.vouched:
            other = attempt.vouched.setdefault(name, begin.rank)
            if other != begin.rank:
                what = f"ranks {other} and {begin.rank} both hold {name!r}, on meshes that have nothing to do with each other"
                self._abort(attempt, f"{what}: cut both from one mesh, or give the tensors different names")
                return

    def _abort_if_missed(self, attempt: Attempt) -> None:
        """Give up an attempt that waits for a rank whose save of that step has failed. A second try has a higher number: ranks
        count their saves alike."""
        for rank, (save, reason) in self._missed.get(attempt.step, {}).items():
            if rank < attempt.world_size and rank not in attempt.ranks and min(attempt.saves.values()) <= save:
                self._abort(attempt, reason)
                return

    def _promise(self, attempt: Attempt) -> VersionRecord:
        """What its record will be; made once, since every rank that restores asks for it."""
        if attempt.promised is None:
            attempt.promised = self.record(attempt)
        return attempt.promised

    def _enter(self, attempt: Attempt, phase: Phase) -> None:
        attempt.phase = phase
        self.changes += 1
        if phase.over:
            attempt.ended = self._clock.monotonic()
            attempt.forget_parts()

    def _abort(self, attempt: Attempt, reason: str) -> None:
        attempt.reason = reason
        if attempt.created and (self._lost is None or self._lost.id < attempt.id):
            self._lost = self._promise(attempt)
        self._restores = (*attempt.restores, *self._restores)[-_RESTORES:]
        self._enter(attempt, Phase.ABORTED)
        self.aborted_in_a_row += 1
        record(ABORTED, repository=self._committer.repository.uri)
        self._log(attempt).warning("the save of step %d was given up: %s", attempt.step, reason)

    def _log(self, attempt: Attempt) -> Log:
        run = self._committer.repository.uri
        return about(logger, repository=run, version=attempt.id, attempt=attempt.attempt, step=attempt.step)

    def _measure(self, entry: Entry) -> None:
        run = self._committer.repository.uri
        record(VERSIONS, repository=run)
        record(RAW, entry.raw, repository=run)
        record(STORED, entry.stored, repository=run)


def _of_node(attempt: Attempt, node: str) -> list[int]:
    return sorted(rank for rank, home in attempt.ranks.items() if home == node)
