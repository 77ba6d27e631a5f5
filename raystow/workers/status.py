"""The state of a node worker, for tools that only read it, and as gauges."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from ..storage.metrics import (
    MEMORY_TIER,
    MEMORY_TIER_LIMIT,
    QUEUE,
    QUEUE_LIMIT,
    RANKS,
    REPLICAS_PRESENT,
    REPLICAS_WANTED,
    UPLOADS,
    record,
)
from .protocol.messages import ReplicationProgress


class Stage(enum.Enum):
    """The progress of a rank's part of an attempt on its node."""

    STAGING = "staging"  # its chunks are still coming
    CODING = "coding"  # all are here, not all are coded
    CODED = "coded"  # what is left is for the node: packs to be uploaded, other ranks to be waited for


@dataclass(frozen=True)
class AttemptStatus:
    """An attempt on one node. ``ranks``: those of the node. ``raw``: bytes of the chunks that are coded, ``coded``: what they
    take now. ``stored``: all of the node's part is in the store, and the commit is waited for."""

    repository: str
    id: int
    attempt: str
    step: int
    ranks: Mapping[int, Stage]
    raw: int
    coded: int
    stored: bool


@dataclass(frozen=True)
class NodeStatus:
    """A node worker. ``at``: its clock, in monotonic seconds. ``raw``: bytes coded since it began; ``uploaded``: bytes that
    stores have taken, by the URI of the repository. ``queue``: bytes being coded, or coded and not uploaded yet. ``uploads``:
    objects on their way. ``memory``: bytes kept to restore from, and what of those lies there decoded as well; ``spare``: that
    were kept and wait to be used again. ``copies``: on other nodes. ``ranks``: how many are connected, by the URI."""

    node: str
    at: float
    raw: int
    uploaded: Mapping[str, int]
    uploads: int
    queue: int
    queue_limit: int
    memory: int
    spare: int
    memory_limit: int
    copies: ReplicationProgress
    ranks: Mapping[str, int]
    attempts: tuple[AttemptStatus, ...]


def measure(status: NodeStatus) -> None:
    """Record the metrics among it."""
    gauges = {
        UPLOADS: status.uploads,
        QUEUE: status.queue,
        QUEUE_LIMIT: status.queue_limit,
        MEMORY_TIER: status.memory,
        MEMORY_TIER_LIMIT: status.memory_limit,
        REPLICAS_WANTED: status.copies.expected,
        REPLICAS_PRESENT: status.copies.present,
    }
    for metric, value in gauges.items():
        record(metric, value, node=status.node)
    for uri, ranks in status.ranks.items():
        record(RANKS, ranks, node=status.node, repository=uri)
