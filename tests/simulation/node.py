"""A simulated node with one rank or part: it saves in the same order of steps as ``NodeAttempt``, with prepared bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from raystow.storage.errors import ClusterError, RankRestarted, RaystowError, StoreError
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
    RestoreChoice,
    RestoreVote,
    SaveContents,
    Ticket,
)
from raystow.workers.protocol.messages.coordinator import NO_VERSION

from . import payload
from .host import REPOSITORY
from .invariants import Role
from .network import SimPort
from .payload import GROUP, Restored

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
        self.restart = -1
        """The restart of the training in which it restores or has restored."""
        self.restored: Restored | None = None
        """None until it has restored."""
        self.failed = False
        """Whether it could not restore, so that the training must be restarted."""
        self._numbers = self._restores = 0  # of saves and restores of the training process
        self.saving: dict[tuple[Incarnation, int], int] = {}
        """The saves that have not ended: training process, number and step."""

    def begin(self, restart: int, *, anew: bool, restores: bool = True) -> None:
        """Begin to train in a restart of the training: ``anew`` in a new process, or in the one that lives. A part that does not
        restore has no state."""
        self.restart, self.failed, self.restored = restart, False, None if restores else Restored()
        former, incarnation = self.incarnation, self.incarnation
        if anew or incarnation is None:
            self._numbers = self._restores = 0
            incarnation = self.incarnation = Incarnation(
                REPOSITORY, 1, next(self._cluster.starts), self.clock.token(), "simulated"
            )
        process = incarnation

        def begins() -> None:
            try:
                port = SimPort(self._cluster, self.process)
                if former not in (None, process):
                    port.ask(RankDisconnected(self.rank, former, "it went away before it saved"))
                if former != process:
                    port.ask(JoinRun(self.rank, process, self._cluster.ranks, self.part))
            except RaystowError:
                pass  # the coordinator learns of the rank with its first vote or save
            if restores:
                self._restore(restart, process)

        self.process.spawn(begins)

    def _restore(self, restart: int, process: Incarnation) -> None:
        """Restore the newest version with the other ranks and parts."""
        try:
            choice = self._agree(process)
        except RaystowError as error:
            self._cluster.note(self.process, f"did not restore: {error}")
            self.failed = self.failed or self.restart == restart
            return
        id, step, token = (choice.entry.id, choice.entry.step, choice.group.round) if choice is not None else (0, 0, NO_VERSION)
        self._cluster.note(self.process, f"has restored {id}")
        if self.restart == restart:
            self.restored = Restored((restart, id), step, token)

    def _agree(self, process: Incarnation) -> RestoreChoice | None:
        """Vote as ``ClusterAgreement`` does, until all have restored one version."""
        port, give_up = SimPort(self._cluster, self.process), self.clock.monotonic() + _TIMEOUT
        vote, tried = self._vote(process), None
        while True:
            try:
                answer = port.ask(replace(vote, tried=tried))
            except RankRestarted:
                if self.clock.monotonic() > give_up:
                    raise
                vote = self._vote(process)
                continue
            if not isinstance(answer, RestoreChoice) or answer.entry == tried:
                return answer if isinstance(answer, RestoreChoice) else None
            tried = answer.entry
            self.clock.sleep(self._cluster.rng.around(5.0))

    def _vote(self, process: Incarnation) -> RestoreVote:
        self._restores += 1
        who = self.rank, 1 if self.part else self._cluster.ranks, process, self._restores
        parts = "" if self.part else ",".join(self._cluster.parts)
        saving = tuple((number, step) for (of, number), step in self.saving.items() if of == process)
        return RestoreVote(*who, _TIMEOUT, allow_uncommitted=False, parts=parts, saving=saving)

    def save(self, step: int, save: payload.Save) -> None:
        """Begin to save a step; a frozen node does so later, for the present training process. A part may ask which step the
        ranks save, or begin before them."""
        assert self.incarnation is not None
        if self.part and self._cluster.rng.chance(0.5):
            process = self.incarnation
            self.process.spawn(lambda: self._save_next(process, step, save))
        else:
            self._save_now(self.incarnation, step, save)

    def _save_next(self, process: Incarnation, step: int, save: payload.Save) -> None:
        saving = tuple(saved for (of, _), saved in self.saving.items() if of == process)
        asked = AskNextSave(self.rank, process, 1, step, seconds=0.0, timeout=_TIMEOUT, saving=saving)
        try:
            step = SimPort(self._cluster, self.process).ask(asked).step
        except RaystowError as error:
            self._cluster.note(self.process, f"does not save step {step}: {error}")
            return
        if process == self.incarnation and self.restored is not None:  # else it was restarted, or restores
            self._save_now(process, step, save)

    def _save_now(self, process: Incarnation, step: int, save: payload.Save) -> None:
        assert self.restored is not None
        self._numbers += 1
        key, restored = (process, self._numbers), self.restored
        self.saving[key] = step
        self.process.spawn(lambda: self._save(key, step, save, restored))

    def _save(self, key: tuple[Incarnation, int], step: int, save: payload.Save, restored: Restored) -> None:
        cluster, (incarnation, number) = self._cluster, key
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
            past=restored.token,
        )
        try:
            ticket = port.ask(Begin(self.process.name, request, SaveContents(0, 0)))
        except RaystowError as error:
            self._end(key, error)
            try:
                port.ask(RankSaveFailed(self.rank, incarnation, number, step, str(error)))
            except RaystowError:
                pass
            return
        self._cluster.watch.pasts[ticket.attempt, self.rank] = restored.past
        try:
            self._store_and_wait(port, ticket, save)
        except RaystowError as error:
            self._end(key, error)
        else:
            self._end(key, None)

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

    def _end(self, key: tuple[Incarnation, int], error: RaystowError | None) -> None:
        step = self.saving.pop(key)
        self._cluster.note(self.process, f"save of step {step} {f'failed: {error}' if error else 'done'}")
