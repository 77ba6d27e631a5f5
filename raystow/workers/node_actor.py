"""The node worker as a Ray actor: one per node, found by the node's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from .node import Node
from .port import Port

NAMESPACE = "raystow"


class NodeActor:
    """Holds a ``Node``; shards never pass through the actor's methods."""

    def __init__(self, connect: Callable[[str], Port]) -> None:
        self._node = Node(ray.get_runtime_context().get_node_id(), connect)

    def address(self) -> str:
        """Where training processes of this node connect to."""
        return self._node.address


def node_actor(connect: Callable[[str], Port]) -> Any:
    """The handle to this node's worker, started if there is none.

    Pinned hard to its node: on another it could not see the ring. It asks for no CPU: the least sliver of one would keep a
    training worker off a node whose CPUs are all spoken for. When its process dies, Ray starts it again, empty.
    """
    node = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(NodeActor)
        .options(
            name=f"node-{node}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(connect)
    )
