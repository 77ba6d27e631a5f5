"""Trainings whose journals are stored in segments, without a cluster: one node for each rank, whose memory tests can clear."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from helpers.journal_port import BoxPort, snapshot
from helpers.processes import incarnation
from raystow.orchestrator.coordinator.segments import Segments, stored_entries
from raystow.orchestrator.journal.journal import Journal
from raystow.orchestrator.journal.recorder import JournalIdentity, StepRecorder
from raystow.orchestrator.journal.rounds import JournalRounds
from raystow.orchestrator.journal.tracked_state import TrackedState
from raystow.storage.coding.digest import stored_digest
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import ClusterError
from raystow.storage.format.root import Root
from raystow.storage.format.version_record import VersionRecord
from raystow.storage.object_store import ObjectStore
from raystow.storage.repository import create_repository
from raystow.storage.runtime.clock import SYSTEM
from raystow.workers.journal.entry_store import EntryStore
from raystow.workers.journal.segment_writer import SegmentWriter, read_entry
from raystow.workers.protocol.coordinator_client import CoordinatorClient
from raystow.workers.protocol.messages import (
    STORE,
    Acknowledged,
    CoordinatorRequest,
    EntryInfo,
    EntryKept,
    EntryPlace,
    Generation,
    Message,
    OpenJournal,
    OpenSegment,
    SegmentStored,
    StoredEntry,
)


class SegmentRun(CoordinatorClient):
    """A run with a step journal. ``every``: steps of a segment. ``store``: the store of the nodes' entries, by default the
    repository's."""

    def __init__(self, where: Path | str, world_size: int = 1, every: int = 2) -> None:
        self.repository = create_repository(where if isinstance(where, str) else where.as_uri())
        self.world_size, self.every = world_size, every
        self.store: ObjectStore = self.repository.store
        self.changed = threading.Condition()
        self.start()

    def start(self) -> None:
        """Start all nodes and the coordinator with empty memory."""
        self.committer = Committer(self.repository, SYSTEM.token())
        self.segments = Segments(self.committer, SYSTEM)
        self.rounds = JournalRounds(SYSTEM, lambda: self.committer.rollbacks)
        self.memories = [EntryStore(1 << 30) for _ in range(self.world_size)]
        uri, id = self.repository.uri, self.repository.id
        self.writers = [
            SegmentWriter(memory, OpenJournal(uri, id, rank, 0, durable_every=self.every), lambda: (self.store, self))
            for rank, memory in enumerate(self.memories)
        ]
        self.in_store: dict[EntryInfo, StoredEntry] = {}

    @property
    def root(self) -> Root:
        return self.repository.root()

    @property
    def durable(self) -> list[int]:
        """Return the last steps of the segments."""
        return [one.step for one in self.root.segments]

    def call(self, request: CoordinatorRequest[Any], timeout: float) -> Message:
        if isinstance(request, OpenSegment):
            return self.segments.open(request.newest)
        assert isinstance(request, SegmentStored)
        self.segments.stored(request)
        if (opened := self.segments.next_commit()) is not None:
            self.segments.commit(opened)
            self.segments.settled(opened)
        return Acknowledged()

    def write(self) -> None:
        """Let all nodes store their due segments, and process the outcomes."""
        for _ in range(2):
            for writer in self.writers:
                writer.step()

    def save(self, step: int) -> None:
        """Commit a version without tensors."""
        id, attempt = self.committer.reserve()
        record = VersionRecord(self.repository.id, id, attempt, self.committer.epoch, step, SYSTEM.now(), self.world_size)
        self.committer.commit(record)

    def recorder(self, training: Training, rank: int = 0) -> StepRecorder:
        who = JournalIdentity(self.repository.uri, self.repository.id, rank, self.world_size, incarnation(SYSTEM.token()), 30.0)
        return StepRecorder(TrackedState(training.model, [training.optimizer]), SegmentPort(self, rank), who)  # type: ignore[arg-type]

    def held(self) -> dict[str, Sequence[EntryInfo]]:
        """Return the entries of the nodes and of the store."""
        self.in_store = stored_entries(self.repository, self.root)
        nodes = {str(rank): memory.holdings(self.repository.id) for rank, memory in enumerate(self.memories)}
        return {**nodes, STORE: tuple(self.in_store)}


class SegmentPort(BoxPort):
    """A ``JournalPort`` on a ``SegmentRun``."""

    def __init__(self, run: SegmentRun, rank: int) -> None:
        super().__init__(run)
        self._run, self._rank = run, rank

    def keep(self, info: EntryInfo, on_kept: Callable[[EntryKept], None]) -> None:
        content = bytes(self._sink.content)
        info = replace(info, digest=stored_digest(content))
        problem = self._run.memories[self._rank].add(info, content, own=True)
        if not problem:
            self._run.writers[self._rank].kept(info)
        on_kept(EntryKept(info.step, 0, problem))

    def save_begun(self, step: int, generation: Generation) -> None:
        self._run.memories[self._rank].save_begun(self._run.repository.id, step, generation)

    def save_failed(self, step: int) -> None:
        self._run.memories[self._rank].save_failed(self._run.repository.id, step)

    def fetch(self, place: EntryPlace, number: int) -> memoryview:
        memory = self._run.memories[self._rank]
        if (view := memory.view(place.info)) is not None:
            return view
        if (stored := self._run.in_store.get(place.info)) is None:
            raise ClusterError("no node has the entry")
        content = memoryview(bytearray(place.info.size))
        read_entry(self._run.store, replace(place, stored=stored), content)
        memory.add(place.info, content, own=True)
        return content


class Training:
    """A small model whose steps depend only on their numbers and the rank."""

    def __init__(self, rank: int = 0) -> None:
        torch.manual_seed(rank)
        self.rank = rank
        self.model = nn.Linear(6, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * self.rank + number))
        self.model(x).square().mean().backward()
        self.optimizer.step()

    def bits(self) -> list[bytes]:
        return snapshot(self.model, self.optimizer)


def states(steps: int, rank: int = 0) -> list[list[bytes]]:
    """Return the states of an undisturbed training, including the initial one."""
    training = Training(rank)
    found = [training.bits()]
    for number in range(1, steps + 1):
        training.step(number)
        found.append(training.bits())
    return found


def record(run: SegmentRun, journal: Journal, training: Training, steps: range) -> None:
    """Record steps, and store each segment when it is due."""
    for number in steps:
        training.step(number)
        journal.record(number, values=number)
        journal.flush()
        run.write()


def begin(run: SegmentRun, base: int | None = None) -> tuple[Training, Journal]:
    """Start a new process of the only rank, and replay. ``base``: the step of the restored version."""
    training = Training()
    recorder = run.recorder(training)
    if base is not None:
        recorder.restored(base, True)
    journal = Journal(recorder)
    journal.replay()
    return training, journal


def replay(run: SegmentRun) -> tuple[Any, list[bytes]]:
    """Start a new process of the only rank in the initial state, and replay; return the last step and the state."""
    training = Training()
    journal = Journal(run.recorder(training))
    reached = journal.replay()
    journal.close()
    return reached, training.bits()
