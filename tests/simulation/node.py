"""A simulated node with one rank or part: it saves in the same order of steps as ``NodeAttempt``, with prepared bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from raystow.storage.errors import ClusterError, RaystowError, StoreError
from raystow.storage.format import keys
from raystow.storage.format.parts import part_number
from raystow.workers.protocol.messages import (
    AskNextSave,
    AwaitRanks,
    Begin,
    Incarnation,
    JoinRun,
    PartFailed,
    PartStaged,
    PartStored,
    RankDisconnected,
    RankFinished,
    RankSaveFailed,
    RankSaveRequest,
    ReplicaQuestions,
    SaveContents,
    Ticket,
)

from . import payload
from .host import REPOSITORY
from .invariants import Role
from .network import SimPort
from .payload import GROUP

if TYPE_CHECKING:
    from .cluster import Cluster

_TIMEOUT = 600.0


class Node:
    """A node worker and the training process of one rank on it, or the process of a part."""

    def __init__(self, cluster: Cluster, rank: int, part: str = "") -> None:
        self._cluster, self.rank, self.part = cluster, part_number(part) if part else rank, part
        self.process = cluster.process(f"node-{part}" if part else f"node{rank}", Role("node"))
        self.store, self.clock = cluster.store(self.process), cluster.clock(self.process)
        self.incarnation: Incarnation | None = None
        self._started = 0  # training processes
        self.saving = 0

    def join(self) -> None:
        """Restart the training process."""
        self._started += 1
        former = self.incarnation
        incarnation = self.incarnation = Incarnation(REPOSITORY, 1, self._started, self.clock.token(), "simulated")

        def tell() -> None:
            try:
                port = SimPort(self._cluster, self.process)
                if former is not None:
                    port.ask(RankDisconnected(self.rank, former, "it went away before it saved"))
                port.ask(JoinRun(self.rank, incarnation, self._cluster.ranks, self.part))
                if self._cluster.rolls_back and not self.part:
                    port.restore()
            except RaystowError:
                pass  # the coordinator learns of the rank with its first save

        self.process.spawn(tell)

    def save(self, step: int, save: payload.Save) -> None:
        """Begin to save a step; a frozen node does so later, for the present training process."""
        incarnation = self.incarnation
        assert incarnation is not None
        self.process.spawn(lambda: self._save(step, save, incarnation))

    def _save(self, step: int, save: payload.Save, incarnation: Incarnation) -> None:
        cluster, number = self._cluster, save[1]
        self.saving += 1
        port = SimPort(cluster, self.process)
        request = RankSaveRequest(
            rank=self.rank,
            world_size=cluster.ranks,
            incarnation=incarnation,
            save=number,
            step=step,
            timeout=_TIMEOUT,
            metrics={"loss": str(float(step % 7))},
            retention=cluster.policy,
            delta=cluster.delta,
            parts="" if self.part else ",".join(cluster.parts),
        )
        try:
            if self.part and cluster.rng.chance(0.5):  # else it does not ask, and may begin before the ranks
                asked = AskNextSave(self.rank, incarnation, 1, step, seconds=0.0, timeout=_TIMEOUT)
                request = replace(request, step=port.ask(asked).step)
            ticket = port.ask(Begin(self.process.name, request, SaveContents(0, 0)))
        except RaystowError as error:
            self._end(step, error)
            try:
                port.ask(RankSaveFailed(self.rank, incarnation, number, step, str(error)))
            except RaystowError:
                pass
            return
        try:
            self._store_and_wait(port, ticket, save)
        except RaystowError as error:
            self._end(step, error)
        else:
            self._end(step, None)

    def _store_and_wait(self, port: SimPort, ticket: Ticket, save: payload.Save) -> None:
        lost = self._cluster.rng.chance(0.2)  # the base may no longer be in memory
        base = None if ticket.base is None or not ticket.deltas or lost else ticket.base.id
        part = payload.part(ticket.node, ticket.id % payload.KINDS, base)
        pack = keys.pack(ticket.id, ticket.attempt, ticket.node, GROUP, 0)
        fragment = keys.fragment(ticket.id, ticket.attempt, ticket.node)
        self._cluster.watch.expected |= {pack: part.pack, fragment: part.fragment}
        self._cluster.watch.histories.begins((ticket.id, ticket.attempt), self._cluster.watch.root)
        uploads: list[RaystowError | None] = []

        def upload() -> None:
            outcome: RaystowError | None = None
            try:
                self.store.put(pack, [part.pack])
            except StoreError as error:
                outcome = error
                self._tell_failed(port, ticket, error)
            uploads.append(outcome)
            self.process.tell()

        self.clock.sleep(self._cluster.rng.around(3.0))
        self.process.spawn(upload)
        reported = False
        try:
            held = payload.digests(self.rank, ticket.step, save)
            if not self.part:
                self._cluster.watch.compared[ticket.attempt, self.rank] = save
            port.ask(RankFinished(ticket, self.rank, 0, () if self.part else held.of(self.rank)))
            waiting = AwaitRanks(ticket)
            while isinstance(asked := port.ask(waiting, self._warned), ReplicaQuestions):
                waiting = AwaitRanks(ticket, answers=tuple(map(held.answer, asked.questions)))
            port.ask(PartStaged(ticket, part.info))
            if not self.process.wait(lambda: bool(uploads), ticket.timeout):
                raise ClusterError("a pack could not be stored in time")
            if uploads[0] is not None:
                raise uploads[0]
            self.store.put(fragment, [part.fragment])
            reported = True
            port.ask(PartStored(ticket, part.info), self._warned)
        except RaystowError as error:
            self._tell_failed(port, ticket, error)
            if not reported:
                self._discard(pack)
            raise

    def _warned(self, text: str) -> None:
        self._cluster.note(self.process, f"is warned: {text}")

    def _tell_failed(self, port: SimPort, ticket: Ticket, error: RaystowError) -> None:
        try:
            port.ask(PartFailed(ticket, str(error)))
        except RaystowError:
            pass

    def _discard(self, pack: str) -> None:
        try:
            self.store.delete([pack])
        except StoreError:
            pass

    def _end(self, step: int, error: RaystowError | None) -> None:
        self.saving -= 1
        self._cluster.note(self.process, f"save of step {step} {f'failed: {error}' if error else 'done'}")
