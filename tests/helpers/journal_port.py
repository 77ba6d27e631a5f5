"""Journals without a cluster: entries in a dict, and the coordinator's agreement as a plain class of this process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from helpers.processes import incarnation
from raystow.orchestrator.journal.journal import Journal
from raystow.orchestrator.journal.recorder import JournalIdentity, StepRecorder
from raystow.orchestrator.journal.rounds import JournalRounds
from raystow.orchestrator.journal.tracked_state import TrackedState
from raystow.storage.coding.kernels import Bytes
from raystow.storage.errors import ClusterError
from raystow.storage.runtime.clock import SYSTEM
from raystow.workers.protocol.messages import (
    EntryInfo,
    EntryKept,
    EntryPlace,
    Generation,
    JournalChoice,
    JournalVote,
    RankReading,
)
from raystow.workers.shm.ring import Ring, SlotPart


class MemorySink:
    """An ``EntryWriter`` whose ring is in this process. ``content``: the bytes of the entry."""

    def __init__(self, slots: int = 8, slot_size: int = 4 << 20) -> None:
        self.ring, self.content = Ring.create(slots * slot_size, slot_size), bytearray()
        self._free = deque(range(slots))

    def take_soon(self) -> int | None:
        return self._free.popleft() if self._free else None

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.ring.slot(slot)[:] = 0xEE
        self._free.extend(slots)

    def add(self, parts: Sequence[SlotPart]) -> int:
        start = len(self.content)
        for slot, at, size in parts:
            self.content += self.ring.slot(slot)[at : at + size].tobytes()
        return start

    def copy(self, content: Bytes) -> int:
        start = len(self.content)
        self.content += content.tobytes()
        return start


class EntryBox:
    """The entries of all ranks, in place of node workers. ``refuse``: steps that are not kept."""

    def __init__(self) -> None:
        self.entries: dict[EntryInfo, bytes] = {}
        self.refuse: set[int] = set()
        self.rounds = JournalRounds(SYSTEM)
        self.changed = threading.Condition()

    def recorder(
        self,
        model: torch.nn.Module,
        *optimizers: torch.optim.Optimizer,
        rank: int = 0,
        world_size: int = 1,
        timeout: float = 30.0,
    ) -> StepRecorder:
        """Return what the journal of a new process of a rank records with."""
        identity = JournalIdentity("memory://box", "box", rank, world_size, incarnation(SYSTEM.token()), timeout)
        return StepRecorder(TrackedState(model, optimizers), BoxPort(self), identity)  # type: ignore[arg-type]

    def journal(self, model: torch.nn.Module, *optimizers: torch.optim.Optimizer, **options: Any) -> Journal:
        """Return a journal for a new process of a rank."""
        return Journal(self.recorder(model, *optimizers, **options))

    def steps(self, rank: int = 0) -> list[int]:
        """Return the steps of a rank in the order of recording."""
        return [info.step for info in self.entries if info.rank == rank]

    def held(self) -> Mapping[str, Sequence[EntryInfo]]:
        """Return the entries of the only node."""
        return {"node": tuple(self.entries)}

    def info(self, step: int, rank: int = 0) -> EntryInfo:
        """Return the newest entry of a step."""
        return [info for info in self.entries if (info.step, info.rank) == (step, rank)][-1]


class BoxPort:
    """A ``JournalPort`` on an ``EntryBox``, or what has its ``held``, ``rounds`` and ``changed``."""

    def __init__(self, box: Any) -> None:
        self._box = box
        self._fetched: dict[int, bytearray] = {}
        self._sink = MemorySink()

    def begin(self, info: EntryInfo, most: int) -> MemorySink:
        self._sink.content = bytearray()
        return self._sink

    def keep(self, info: EntryInfo, on_kept: Callable[[EntryKept], None]) -> None:
        if info.step in self._box.refuse:
            on_kept(EntryKept(info.step, 0, "the memory for entries is full"))
            return
        self._box.entries[info] = bytes(self._sink.content)
        on_kept(EntryKept(info.step, 1))

    def save_begun(self, step: int, generation: Generation) -> None:
        pass

    def save_failed(self, step: int) -> None:
        pass

    def fetch(self, place: EntryPlace, number: int) -> memoryview:
        if place.info not in self._box.entries:
            raise ClusterError("no node has the entry")
        if (earlier := self._fetched.get(number)) is not None:
            earlier[:] = bytes(len(earlier))  # not valid any more
        self._fetched[number] = bytearray(self._box.entries[place.info])
        return memoryview(self._fetched[number])

    def settle(self, vote: JournalVote) -> JournalChoice:
        box = self._box
        with box.changed:
            round = box.rounds.vote(vote, box.held)
            box.changed.notify_all()
            assert box.changed.wait_for(lambda: round.answers(vote), vote.timeout)
            return round.answer(vote)

    def reading(self, rank: RankReading) -> None:
        self._box.rounds.reading(rank)

    def close(self) -> None:
        pass


def snapshot(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> list[bytes]:
    """Return all bits of a training state."""
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            tensors.append({key: value for key, value in group.items() if key != "params"})
            for parameter in group["params"]:
                tensors += [parameter, *(optimizer.state[parameter][key] for key in sorted(optimizer.state.get(parameter, {})))]
    return [
        one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if isinstance(one, torch.Tensor)
        else repr(one).encode()
        for one in tensors
    ]
