"""The node worker as a Ray actor: one per node, found by the node's name."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Concatenate, ParamSpec, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from ...storage.errors import ClusterError
from ...storage.runtime import background
from ...storage.runtime.clock import SYSTEM
from ...storage.runtime.gc_pause import freeze
from ...storage.stores.settings import JobSettings
from .. import actor_environment
from ..protocol.coordinator_client import CoordinatorClient
from ..protocol.messages import (
    PROTOCOL,
    AttemptKey,
    Contact,
    EntryInfo,
    Holding,
    NodeStatus,
    ReplicationProgress,
    Saves,
    check_protocol,
)
from ..ray_connection import RayConnection
from ..replication.peers import Peers
from .node import Node

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_Parameters = ParamSpec("_Parameters")

NAMESPACE = "raystow"
NODE = "node-"
"""What the names of node workers begin with; the node's id follows."""

_SURVEY = 5.0  # seconds in which a node must say what it has in memory
_START = 30.0  # seconds within which another node's worker must have started
_ANSWER = 10.0  # seconds within which another node must answer a question about its copies
_ZONES = ("zone", "ray.io/availability-zone", "topology.kubernetes.io/zone")  # labels that say which failure domain a node is in
_LOOK = 1.0  # seconds from one look at whether the worker is used to the next
_AT_ONCE = 16  # calls that a node worker serves at a time
_SEES_GPUS = (2, 56)  # from this version of Ray on, an actor that asks for no GPU sees all of its node's


class NodeActor:
    """Holds a ``Node``; neither shards nor copies pass through the actor's methods."""

    def __init__(self, connect: Callable[[str, JobSettings], CoordinatorClient]) -> None:
        node, host = actor_environment.enter(settings_sent=True), ray.util.get_node_ip_address()
        # To look through Ray's modules and the others takes the collector 0.1 s, in which nothing is coded or answered.
        self.node = Node(node, connect, peers=RayPeers(), host=host, when_warm=freeze)
        background.repeat("raystow-unused", self.end_if_unused)

    def address(self, protocol: str = PROTOCOL) -> str:
        """Where training processes of this node connect to."""
        check_protocol(protocol, "a process of this node")
        if not self.node.expect():
            threading.Event().wait()  # ends with this process: the caller then starts another worker
        return self.node.address

    def contact(self) -> Contact:
        """Where other nodes connect to."""
        return self.node.contact

    def holdings(self, repository: str) -> list[Holding]:
        """See ``Node.holdings``."""
        return self.node.holdings(repository)

    def journal_entries(self, repository: str) -> list[EntryInfo]:
        """The entries of recorded steps of a repository."""
        return list(self.node.journal.store.holdings(repository))

    def committed(self, attempt: AttemptKey) -> None:
        """See ``ReplicaStore.committed``."""
        self.node.replicas.committed(attempt)

    def given_up(self, attempt: AttemptKey) -> None:
        """See ``ReplicaStore.given_up``."""
        self.node.replicas.given_up(attempt)

    def saves(self) -> dict[str, Saves]:
        """See ``Node.saves``."""
        return self.node.saves()

    def ask_for_settings(self, uri: str) -> list[int]:
        """See ``Node.ask_for_settings``. Nothing if there are none."""
        return [asked] if (asked := self.node.ask_for_settings(uri)) else []

    def saves_to(self, uri: str) -> list[Saves]:
        """The progress of the saves to the repository at ``uri``, if ranks are connected that save there."""
        return [saves for of, saves in self.node.saves().items() if of == uri]

    def copies(self) -> ReplicationProgress:
        """The progress of the copies that this node is responsible for."""
        return self.node.replicator.progress

    def status(self) -> NodeStatus:
        """See ``Node.status``."""
        return self.node.status()

    def end_if_unused(self) -> bool:
        """End for good if nobody uses this worker. A process that comes later starts another one."""
        if not self.node.end_if_unused():
            SYSTEM.sleep(_LOOK)
            return True
        logger.info("the node worker ends: nobody uses it")
        ray.kill(ray.get_runtime_context().current_actor)
        return False


class RayPeers(Peers):
    """The other nodes' workers. Questions go through Ray, objects do not.

    Attributes:
        census_patience: Seconds within which the head node must list the nodes.
    """

    def __init__(self) -> None:
        self.census_patience = _ANSWER
        super().__init__(lambda node: _ask(node, NodeActor.contact, _START), SYSTEM)
        self._census: Future[dict[str, str]] | None = None

    def nodes(self) -> Mapping[str, str]:
        """See ``NodePeers``. A frozen head node is asked once."""
        connection = RayConnection.here()
        if (census := self._census) is None:
            census = self._census = connection.question(_nodes_with_workers)
        try:
            return connection.answer(census, self.census_patience)
        finally:
            if census.done():
                self._census = None

    def holdings(self, node: str, repository: str) -> Sequence[Holding]:
        """See ``NodePeers``."""
        return _ask(node, NodeActor.holdings, _ANSWER, repository)

    def committed(self, node: str, attempt: AttemptKey) -> None:
        """See ``NodePeers``."""
        _ask(node, NodeActor.committed, _ANSWER, attempt)

    def given_up(self, node: str, attempt: AttemptKey) -> None:
        """See ``NodePeers``."""
        _ask(node, NodeActor.given_up, _ANSWER, attempt)


def _nodes_with_workers() -> dict[str, str]:
    workers = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    alive = {node["NodeID"]: node["Labels"] for node in ray.nodes() if node["Alive"]}
    return {node: _zone(labels) for node, labels in alive.items() if _name(node) in workers}


def _ask(
    node: str,
    method: Callable[Concatenate[NodeActor, _Parameters], _Answer],
    timeout: float,
    *args: _Parameters.args,
    **kwargs: _Parameters.kwargs,
) -> _Answer:
    """Call a method of a node's worker once. ``ClusterError`` if there is no worker, or it does not answer in time."""
    connection, end = RayConnection.here(), SYSTEM.monotonic() + timeout
    if (worker := connection.ask(lambda: _worker(node), timeout)) is None:
        raise ClusterError("has no worker", subject=f"node {node}")
    remote = getattr(worker, method.__name__).options(max_task_retries=0)
    left = max(0.0, end - SYSTEM.monotonic())
    answer: _Answer = connection.call(lambda: remote.remote(*args, **kwargs), left, f"node {node}")
    return answer


def node_actor(connect: Callable[[str, JobSettings], CoordinatorClient]) -> ActorHandle:
    """Return the handle to this node's worker, started if there is none.

    It runs on this node only, since it shares memory with the node's processes. It asks for no CPU, since even a fraction of one
    could keep a training worker off a node whose CPUs are all taken. It asks for no GPU either, but sees all of them, since with
    ``Compression(process="node")`` it codes on them. If its process dies, Ray starts it again, with nothing in memory.
    """
    node = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(NodeActor)
        .options(
            name=_name(node),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=_AT_ONCE,
            runtime_env=actor_environment.for_actor(**gpu_variables(ray.__version__)),
            scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(connect)
    )


def saves_on(node: str) -> dict[str, Saves] | None:
    """See ``Node.saves``; None where there is no node worker. ``ClusterError`` if it does not answer."""
    if RayConnection.here().ask(lambda: _worker(node), _ANSWER) is None:
        return None
    return _ask(node, NodeActor.saves, _ANSWER)


async def holders(repository: str) -> dict[str, dict[int, tuple[str, ...]]]:
    """Attempt -> number of a node in it -> the nodes that have all its objects in memory, as far as they answer in time."""
    found: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    try:
        by_node = await _held_by_each(NodeActor.holdings, repository)
    except ClusterError:
        return {}  # the head node is frozen: the store has the version, or none is found in memory
    for node, held in by_node.items():
        for holding in held:
            for number in holding.whole:
                found[holding.attempt.token][number].append(node)
    return {token: {number: tuple(nodes) for number, nodes in of.items()} for token, of in found.items()}


async def journal_entries(repository: str) -> dict[str, list[EntryInfo]]:
    """The entries of recorded steps that nodes have in memory, by node, as far as they answer in time."""
    return await _held_by_each(NodeActor.journal_entries, repository)


async def ranks_connected(uri: str) -> bool:
    """Whether a node worker that answers in time has ranks connected that save to the repository at ``uri``."""
    return bool(await _found(NodeActor.saves_to, uri))


def ask_for_settings(uri: str) -> int:
    """As ``Node.ask_for_settings``, of some nodes that have ranks connected and answer in time. Not for the thread of a loop."""
    try:
        return sum(asyncio.run(_found(NodeActor.ask_for_settings, uri)))
    except ClusterError:
        return 0  # the head node is frozen


async def _found(method: Callable[[NodeActor, str], list[_Answer]], uri: str) -> list[_Answer]:
    """What some nodes answer. Asks few, then more: while a training goes on, any of them has ranks."""
    nodes, number = await _alive(), 1
    while nodes:
        answers = await asyncio.gather(*(_held(node, method, uri) for node in nodes[:number]))
        if any(answers):
            return list(itertools.chain(*answers))
        nodes, number = nodes[number:], 4 * number
    return []


async def _alive() -> list[str]:
    nodes = await asyncio.to_thread(RayConnection.here().ask, ray.nodes, _SURVEY)
    return [node["NodeID"] for node in nodes if node["Alive"]]


async def _held_by_each(method: Callable[[NodeActor, str], list[_Answer]], repository: str) -> dict[str, list[_Answer]]:
    alive = await _alive()
    return dict(zip(alive, await asyncio.gather(*(_held(node, method, repository) for node in alive)), strict=True))


async def _held(node: str, method: Callable[[NodeActor, str], list[_Answer]], repository: str) -> list[_Answer]:
    connection = RayConnection.here()
    try:
        if (worker := await asyncio.to_thread(connection.ask, lambda: _worker(node), _SURVEY)) is None:
            return []
        answer = connection.send(lambda: getattr(worker, method.__name__).remote(repository), f"node {node}")
        held: list[_Answer] = await asyncio.wait_for(answer, _SURVEY)
        return held
    except (ClusterError, RayError, asyncio.TimeoutError):
        return []  # its worker is dead or frozen


def _worker(node: str) -> ActorHandle | None:
    """None if there is none."""
    try:
        return ray.get_actor(_name(node), NAMESPACE)
    except ValueError:
        return None


def _zone(labels: Mapping[str, str]) -> str:
    return next((labels[label] for label in _ZONES if label in labels), "")


def _name(node: str) -> str:
    return f"{NODE}{node}"


def gpu_variables(version: str) -> dict[str, str]:
    """The variables that keep the GPUs visible to an actor that asks for none."""
    numbers = tuple(int(number) for number in version.split(".")[:2])
    return {} if numbers >= _SEES_GPUS else {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
