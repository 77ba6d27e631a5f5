"""Snapshots of a cluster that saves, for ``raystow top``."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from raystow.orchestrator.coordinator.attempt import Phase
from raystow.orchestrator.coordinator.status import ClusterStatus
from raystow.storage.format.root import Entry
from raystow.workers.protocol.messages import (
    AttemptStatus,
    CoordinatorStatus,
    FailedAttempt,
    NodeStatus,
    OpenAttempt,
    ReplicationProgress,
)

RUN, NAME = "s3://bucket/a-prefix-that-is-rather-long/of-several-parts/runs/llama", "coordinator-1"
NEWEST = Entry(41, "a" * 16, "d" * 64, 100, 4100, 1000.0, raw=782 << 30, stored=616 << 30)
SAVE = OpenAttempt(42, "b" * 16, 4200, Phase.GATHERING.value, 16384, 16380, 16000, 2048, 12, 3.25, 596.75)
LOST = FailedAttempt(40, "c" * 16, 4000, "ranks [3, 7] had not delivered their shards after 600 s: " + "and so on " * 8, 119.0)
OVERVIEW = CoordinatorStatus(RUN, "r" * 16, 7, NEWEST, 130.0, 1, (SAVE,), (LOST,))


def node(number: int, *, at: float = 10.0, raw: int = 0, **changes: Any) -> NodeStatus:
    here, late = range(8 * number, 8 * number + 8), 3 if number == 2 else 0
    ranks = {"staging": tuple(here[:late]), "coding": (), "coded": tuple(here[late:])}
    attempt = AttemptStatus(42, "b" * 16, 4200, ranks, 1 << 30, 800 << 20, stored=number == 3)
    status = NodeStatus(
        node=f"{number:08x}" * 7,
        at=at,
        raw=raw,
        uploaded={RUN: raw * 3 // 4},
        uploads=16,
        queue=3 << 30,
        queue_limit=4 << 30,
        spare=0,
        memory=111 << 30,
        memory_limit=200 << 30,
        copies=ReplicationProgress(200, 100, ("f" * 56,)),
        ranks={RUN: 8},
        attempts={RUN: (attempt,)},
    )
    return replace(status, **changes)


def snapshot(*nodes: NodeStatus | None, coordinator: CoordinatorStatus | None = OVERVIEW, at: float = 100.0) -> ClusterStatus:
    return ClusterStatus(at, {NAME: coordinator}, {one.node if one else "dead": one for one in nodes})


class FixedProbe:
    """A probe that returns these snapshots in order, and then always the last one."""

    def __init__(self, *snapshots: ClusterStatus) -> None:
        self._snapshots = list(snapshots)

    def look(self) -> ClusterStatus:
        return self._snapshots.pop(0) if len(self._snapshots) > 1 else self._snapshots[0]
