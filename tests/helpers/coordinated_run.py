"""A coordinator of two ranks that tests advance step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from helpers.begins import begin_of
from helpers.builders import memory_repository
from helpers.fake_clock import FakeClock
from helpers.processes import incarnation
from raystow.orchestrator.coordinator.attempt import Phase
from raystow.orchestrator.coordinator.attempts import Coordinator
from raystow.storage.commit.committer import Committer
from raystow.storage.format.version_record import FragmentInfo
from raystow.workers.protocol.messages import Ticket


def part(node: int, bases: tuple[int, ...] = ()) -> FragmentInfo:
    """Return the report of a node that has stored nothing."""
    return FragmentInfo(node, 0, "00" * 32, (node,), 0, 0, 0, bases=bases, packs=0)


@dataclass
class CoordinatedRun:
    core: Coordinator
    committer: Committer
    clock: FakeClock

    def begin(
        self,
        rank: int,
        step: int = 1,
        *,
        process: str = "a",
        world: int = 2,
        save: int = 1,
        replicated: int = 7,
        **fields: Any,
    ) -> Ticket:
        who, expected = incarnation(f"{process}{rank}"), replicated if rank == 0 else 0
        return self.core.begin(begin_of(rank, world, who, save, f"node-{rank % 2}", step, 60.0, replicated, expected, **fields))

    def phase(self, ticket: Ticket) -> Phase:
        return self.core.attempt(ticket).phase

    def reason(self, ticket: Ticket) -> str:
        return self.core.attempt(ticket).reason

    def seal(self, tickets: list[Ticket], bases: tuple[int, ...] = ()) -> None:
        for rank, ticket in enumerate(tickets):
            self.core.finished(ticket, rank, 7 if rank == 0 else 0)
        for ticket in tickets:
            self.core.fragment(ticket, part(ticket.node, bases))

    def both(self, step: int, *, delta: int = 0) -> list[Ticket]:
        return [self.begin(rank, step, save=step, delta=delta) for rank in range(2)]

    def commit(self) -> None:
        while (attempt := self.core.next_commit()) is not None:
            self.core.settled(attempt, self.committer.commit(self.core.record(attempt)).entry)


def coordinated_run() -> CoordinatedRun:
    clock = FakeClock()
    committer = Committer(memory_repository(clock), "test")
    core = Coordinator(committer, clock, writer={})
    for rank in range(2):
        core.join(rank, incarnation(f"a{rank}"), 2)
    return CoordinatedRun(core, committer, clock)
