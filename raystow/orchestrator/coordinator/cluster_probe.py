"""Asks the coordinators and node workers of a running cluster for their status. Starts nothing, and waits 2 s at most,
or 10 s for a frozen head node."""

from __future__ import annotations

import ray
from ray.exceptions import RayError

from ...storage.errors import ClusterError
from ...storage.runtime.clock import SYSTEM
from ...workers.node.actor import NAMESPACE, NODE
from ...workers.protocol.messages import CoordinatorStatus, NodeStatus
from .. import ray_cluster
from .ray_client import COORDINATOR
from .status import ClusterStatus

_TIMEOUT = 2.0  # seconds for all answers together
_HEAD = 10.0  # seconds for the head node's answers and those


class ClusterProbe:
    """Call ``look`` from one thread, at any rate. An actor that has not answered yet is not asked again: it may be frozen, and
    requests would pile up."""

    def __init__(self, address: str = "auto") -> None:
        self._ray = ray_cluster.connect(address)
        self._pending: dict[str, ray.ObjectRef] = {}

    def look(self) -> ClusterStatus:
        """The status now. Never raises for a part of the cluster that is down."""
        try:
            return self._ray.ask(self._look, _HEAD)
        except ClusterError as error:
            return _trouble(error)

    def _look(self) -> ClusterStatus:
        try:
            actors = ray.util.list_named_actors(all_namespaces=True)
            names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
            requests = {name: self._pending.get(name) or _request(name) for name in names}
            self._pending = {name: request for name, request in requests.items() if request is not None}
            waiting = list(self._pending.values())
            ready = ray.wait(waiting, num_returns=len(waiting), timeout=_TIMEOUT)[0] if waiting else []
        except (RayError, ConnectionError, RuntimeError) as error:
            self._pending.clear()
            return _trouble(error)
        coordinators: dict[str, CoordinatorStatus | None] = {}
        nodes: dict[str, NodeStatus | None] = {}
        for name, request in requests.items():
            try:
                answer = ray.get(self._pending.pop(name)) if request in ready else None
            except RayError:
                answer = None  # it has died, or runs another version of raystow
            if name.startswith(COORDINATOR):
                coordinators[name] = answer
            elif name.startswith(NODE):
                nodes[name.removeprefix(NODE)] = answer
        return ClusterStatus(SYSTEM.now(), coordinators, nodes)


def _trouble(error: Exception) -> ClusterStatus:
    return ClusterStatus(SYSTEM.now(), {}, {}, trouble=f"the head node does not answer: {error}")


def _request(name: str) -> ray.ObjectRef | None:
    """None for an actor that has ended or has no status."""
    method = "overview" if name.startswith(COORDINATOR) else "status" if name.startswith(NODE) else ""
    try:
        return getattr(ray.get_actor(name, NAMESPACE), method).options(max_task_retries=0).remote() if method else None
    except (ValueError, AttributeError):
        return None
