"""The gauges of a node worker."""

from __future__ import annotations

from ...storage.runtime.metrics import (
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
from ..protocol.messages import NodeStatus


def measure(status: NodeStatus) -> None:
    """Record the status as metrics."""
    gauges = {
        UPLOADS: status.uploads,
        QUEUE: status.queue,
        QUEUE_LIMIT: status.queue_limit,
        MEMORY_TIER: status.memory,
        MEMORY_TIER_LIMIT: status.memory_limit,
        REPLICAS_WANTED: status.copies.wanted,
        REPLICAS_PRESENT: status.copies.present,
    }
    for metric, value in gauges.items():
        record(metric, value, node=status.node)
    for uri, ranks in status.ranks.items():
        record(RANKS, ranks, node=status.node, repository=uri)
