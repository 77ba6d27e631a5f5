"""A simulated coordinator actor: drives the real state machine as ``orchestrator.coordinator_actor`` does, without Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from raystow.orchestrator.coordinator.attempt import Attempt, Phase
from raystow.orchestrator.coordinator.attempts import Coordinator
from raystow.orchestrator.coordinator.housekeeping import Housekeeping
from raystow.orchestrator.coordinator.requests import Answer, handle
from raystow.orchestrator.restore.rounds import RestoreRounds
from raystow.orchestrator.restore.version_cache import VersionCache
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import ClusterError, Fenced, RaystowError, SaveFailed
from raystow.storage.format.root import Entry, Root
from raystow.storage.format.version_record import VersionRecord
from raystow.storage.repository import create_repository
from raystow.storage.retention.policy import Policy
from raystow.workers.protocol.messages import Acknowledged, JoinRun, Message, RestoreChoice, RestoreVote, Ticket

from . import payload
from .invariants import Role
from .journal import Violation

if TYPE_CHECKING:
    from .cluster import Cluster

_TICK = 60.0  # seconds; shorter ticks, as in the actor, would only slow the simulation down
_PATIENCE = 3600.0
_FOR_EVER = 1e9


REPOSITORY = "5" * 32
"""The id of the repository, so that processes know it before a coordinator has made it."""


class Host:
    """One coordinator, with the methods of the actor."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._role = Role("coordinator")
        self.process = cluster.process("host", self._role)
        self._clock = cluster.clock(self.process)
        self._core: Coordinator | None = None
        self._notified_changes = 0
        self._housekeeping_active = False
        self.deleting = False
        """Whether it may delete objects based on a root that it has already read."""
        self._tickets: dict[str, Ticket] = {}
        self._voting = False
        self.process.spawn(self._main)

    def handle(self, request: Message) -> Message | None:
        """Answer a request, as the actor does."""
        if isinstance(request, RestoreVote):
            return self._settle(request)
        answer: Answer = self._apply(lambda core: handle(core, request))
        if isinstance(request, JoinRun):
            with self._restoring():
                self._rounds.left(request.rank, request.incarnation)
            self.process.tell()

        def answers() -> bool:
            try:
                return answer() is not None
            except RaystowError:
                return True

        while (found := answer()) is None:  # a warning may be out of date before this process goes on
            self.process.wait(answers, _FOR_EVER)
        if isinstance(found, Ticket):
            self._tickets[found.attempt] = found
        return found

    @property
    def in_charge(self) -> bool:
        """Whether the coordinator has taken an epoch."""
        return self._core is not None

    def check_ended(self) -> None:
        """Check that every attempt of this coordinator has ended."""
        if self._core is not None:
            for attempt in self._open():
                raise Violation("every attempt ends", f"{self.process} still has {attempt.attempt}: {attempt.phase.value}")

    def _settle(self, vote: RestoreVote) -> Message:
        """Take a vote as the actor does, but never on a save that is in memory only."""
        self._apply(lambda core: core.check_member(vote))
        with self._restoring():
            round = self._rounds.vote(vote)
            self._apply(lambda core: core.restores(vote, exists=bool(round.candidates)))
            self._apply(lambda core: core.restored(self._rounds.restored()))
        self.process.tell()
        self.process.wait(lambda: round.answers(vote.tried) or round.warns(vote), vote.timeout)
        if not round.answers(vote.tried):
            return round.waits(vote)
        entry = round.answer(vote.tried)
        return Acknowledged() if entry is None else RestoreChoice(entry, group=round.group)

    @contextlib.contextmanager
    def _restoring(self) -> Iterator[None]:
        """One task at a time may change the rounds of restores."""
        self.process.wait(lambda: not self._voting, _FOR_EVER)
        self._voting = True
        try:
            yield
        finally:
            self._voting = False
            self.process.tell()

    def _tick_rounds(self) -> None:
        while True:
            with self._restoring():
                self._rounds.tick()
            self.process.tell()
            self._clock.sleep(_TICK)

    def _main(self) -> None:
        core = self._start()
        self.process.spawn(self._tick_rounds)
        while True:
            while (attempt := core.next_commit()) is not None:
                record = core.record(attempt)
                self._check_members(record)
                self._check_differences(attempt, record)
                core.settled(attempt, self._commit(record))
                self._notify()
                if attempt.phase is Phase.COMMITTED:
                    self._check_order(attempt)
                    if attempt.retention is not None:
                        self._start_housekeeping(attempt.retention)
            core.tick()
            self._check_deadlines()
            core.nodes_alive(self._cluster.nodes_alive())
            self._notify()
            for id, token in core.abandoned():
                self.deleting = True
                self._discard(id, token)
                self.deleting = self._housekeeping_active
            self.process.wait(lambda: core.next_commit() is not None, _TICK)

    def _start(self) -> Coordinator:
        while self._core is None:
            try:
                repository = create_repository(self._cluster.uri, clock=self._clock, first=Root(repository=REPOSITORY))
                self._committer = Committer(repository, f"{self.process}-{self._clock.token()}")
            except RaystowError:
                self._clock.sleep(5.0)  # the actor is restarted by the next call
                continue
            self._role.epoch, self._role.owner = self._committer.epoch, self._committer.fence.owner
            self._housekeeping = Housekeeping(self._committer)
            self._known = VersionCache(repository, on_read=self._committer.notice)
            core = self._core = Coordinator(self._committer, self._clock, writer={"raystow": "simulated"})
            current = self._committer.is_current
            self._rounds = RestoreRounds(repository, self._clock, self._known, is_current=current, member=core.members.get)
            self._cluster.note(self.process, f"is in charge, epoch {self._committer.epoch}")
            self.process.tell()
        return self._core

    def _apply(self, change: Callable[[Coordinator], Any]) -> Any:
        if not self.process.wait(lambda: self._core is not None, _PATIENCE):
            raise ClusterError("the coordinator does not start")
        assert self._core is not None
        try:
            return change(self._core)
        finally:
            self._notify()

    def _notify(self) -> None:
        assert self._core is not None
        if self._core.changes != self._notified_changes:
            self._notified_changes = self._core.changes
            self.process.tell()

    def _start_housekeeping(self, policy: Policy) -> None:
        assert self._core is not None
        bases = self._core.bases

        def run() -> None:
            self._role.since, self._role.keep_last = self._cluster.model.now, policy.keep_last or 0
            self._housekeeping.run(policy, bases)
            self._housekeeping_active = self.deleting = False

        if not self._housekeeping_active:
            self._housekeeping_active = self.deleting = True
            self.process.spawn(run)

    def _commit(self, record: VersionRecord) -> Entry | RaystowError:
        watch = self._cluster.watch
        try:
            entry = self._committer.commit(record).entry
        except RaystowError as error:
            if isinstance(error, SaveFailed | Fenced):
                watch.says_never((record.id, record.attempt))
            self._cluster.note(self.process, f"did not commit {record.id}: {error}")
            return error
        self._known.committed(self._committer.root)
        watch.says_committed((record.id, record.attempt))
        self._cluster.note(self.process, f"committed {record.id}, step {record.step}")
        return entry

    def _discard(self, id: int, attempt: str) -> None:
        try:
            self._committer.discard(id, attempt)
        except RaystowError:
            pass  # the objects stay until the next collection

    def _open(self) -> list[Attempt]:
        """Return the attempts that have not ended."""
        found = []
        for token, ticket in list(self._tickets.items()):
            try:
                assert self._core is not None
                attempt = self._core.attempt(ticket)
            except SaveFailed:  # ended and removed
                del self._tickets[token]
                continue
            if attempt.phase.over:
                del self._tickets[token]
            else:
                found.append(attempt)
        return found

    def _check_deadlines(self) -> None:
        for attempt in self._open():
            if attempt.phase is not Phase.READY and attempt.deadline <= self._clock.monotonic():
                raise Violation("every attempt ends", f"{self.process} lets {attempt.attempt} live past its deadline")

    def _check_members(self, record: VersionRecord) -> None:
        """Check that all ranks and parts have delivered; each has a node of its own."""
        cluster = self._cluster
        if len(record.fragments) != cluster.ranks + len(cluster.parts) or {*record.parts} != {*cluster.parts}:
            nodes = [info.node for info in record.fragments]
            raise Violation("a version has all ranks and parts", f"{record.id} has nodes {nodes} and parts {record.parts}")
        pasts = {member: cluster.watch.pasts[record.attempt, member] for member in cluster.members}
        if len({past for past in pasts.values() if past is not None}) > 1:
            raise Violation("all members of a version have one past", f"{record.id} has {pasts}")

    def _check_differences(self, attempt: Attempt, record: VersionRecord) -> None:
        """Check that each flipped bit is named with its tensor, its element and the right rank, and that nothing else is. A node
        that does not answer leaves a difference unnamed, which is a warning."""
        flip, found = payload.flip_of(record.step), record.differences
        wrong = flip is not None and flip.rank < record.world_size and record.world_size > 1
        saves = {self._cluster.watch.compared[attempt.attempt, rank] for rank in range(record.world_size)}
        if len(saves) == 1 and (flip is None or not wrong):
            if found:
                raise Violation("no rank is blamed for bits that all have", f"{found} in step {record.step}")
            return
        if not found and not any("other bits of the same tensors" in warning.text for warning in attempt.warnings):
            raise Violation("no rank has other bits unnoticed", f"{flip or saves} in step {record.step}")
        if flip is None or len(saves) > 1:  # a rank that was frozen saves later, although the training has been restarted
            return
        for one in found:
            sides = {*one.odd, *one.others}
            blamed = one.odd == (flip.rank,) if len(sides) > 2 else flip.rank in sides
            if len(found) > 1 or not blamed or (one.name, one.first, one.elements) != (flip.name, (flip.element,), 1):
                raise Violation("a difference is named as it is", f"{one}, where {flip} was made")

    def _check_order(self, committed: Attempt) -> None:
        for attempt in self._open():
            if attempt.id < committed.id:
                raise Violation(
                    "versions come in the order of saves", f"{committed.id} was committed, {attempt.id} is {attempt.phase.value}"
                )
