"""The node worker as a Ray actor: one per node, found by the node's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from .node import Node
from .port import Port

NAMESPACE = "raystow"
_SEES_GPUS = (2, 56)  # from this version of Ray on, an actor that asks for no GPU sees all of its node's


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
    training worker off a node whose CPUs are all spoken for. It asks for no GPU either, and sees them all the same: with
    ``compress_in="node"`` it codes on them. When its process dies, Ray starts it again, empty.
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
            runtime_env=_environment(ray.__version__),
            scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(connect)
    )


def _environment(version: str) -> dict[str, Any] | None:
    """The runtime environment in which the GPUs stay visible to an actor that asks for none."""
    numbers = tuple(int(number) for number in version.split(".")[:2])
    return None if numbers >= _SEES_GPUS else {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
