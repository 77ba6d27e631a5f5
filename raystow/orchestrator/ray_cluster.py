"""Connects this process to a Ray cluster, and asks its head node."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import ray
from ray._private.services import get_ray_address_from_environment
from ray._private.state import jobs, state
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.exceptions import RayError

from ..storage.errors import ClusterError
from ..storage.runtime.clock import SYSTEM, same_random_state
from ..workers import head_node
from ..workers.ray_connection import RayConnection

VERSION: str = ray.__version__
"""The version of Ray."""

_UNAUTHENTICATED = "AuthenticationError", "InvalidAuthToken"  # in messages of Ray
_ANSWER = 30.0  # seconds in which the head node must answer a question


def connect(address: str = "auto") -> RayConnection:
    """Return this process's connection to Ray. If there is none, connect to the cluster at ``address``, by default the one that
    this machine belongs to; raise ``ClusterError`` if there is no such cluster."""
    if ray.is_initialized():
        return RayConnection.here()
    try:
        head_node.reach(get_ray_address_from_environment("auto", None) if address == "auto" else address)
        with same_random_state():  # Ray draws from Python's generator, whose next numbers belong to the training
            ray.init(address=address, log_to_driver=False, logging_level="warning")
    except (OSError, RayError) as error:
        if any(sign in str(cause) for cause in (error, error.__cause__, error.__context__) for sign in _UNAUTHENTICATED):
            remedy = "set RAY_AUTH_MODE=token, and give this process the token of the cluster"
            raise ClusterError("the Ray cluster refuses this process, which shows no valid token", remedy=remedy) from error
        remedy = "start one (`ray start --head`, or ray.init()), correct RAY_ADDRESS, or read with raystow.open"
        raise ClusterError(f"no Ray cluster is running here: {error}", remedy=remedy) from error
    except RuntimeError as error:  # Ray or Python has another version there
        what = "this process cannot join the Ray cluster that is running here"
        raise ClusterError(f"{what}: {error}", remedy="use the cluster's versions of Ray and Python") from error
    return RayConnection.here()


def entrypoint() -> str:
    """Return the command line of the driver of this process's job; "" if it is not known."""
    if not ray.is_initialized():
        return ""
    job = ray.get_runtime_context().get_job_id()
    return next((str(one.get("Entrypoint", "")) for one in jobs() if one.get("JobID") == job), "")


def is_here() -> bool:
    """Whether this machine belongs to a cluster, also to one that does not answer or refuses this process."""
    if ray.is_initialized() or os.environ.get("RAY_ADDRESS") == "local":
        return bool(ray.is_initialized())
    try:
        return bool(head_node.listens(get_ray_address_from_environment("auto", None)))
    except OSError:
        return False


def start_here() -> RayConnection:
    """Start a cluster on this machine, which ends with this process."""
    with same_random_state():
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="error")
    return RayConnection.here()


@contextlib.contextmanager
def connected() -> Iterator[RayConnection]:
    """``connect``, and close a connection that was made for this alone."""
    before = ray.is_initialized()
    try:
        yield connect()
    finally:
        if not before:
            ray.shutdown()


def process_here(role: str = "process") -> str:
    """This process for people: its role, process id and host."""
    return f"{role} {os.getpid()} on {socket.gethostname()}"


def run_here() -> str:
    """This run for people: its job, and the time now."""
    now = datetime.fromtimestamp(SYSTEM.now(), timezone.utc)
    return f"job {RayConnection.here().job}, since {now:%Y-%m-%d %H:%M:%S} UTC"


def gpus_here(connection: RayConnection) -> int:
    """The GPUs of this node, as Ray counts them: those of all its workers, however few of them this process sees."""
    nodes = _nodes(connection)
    return int(next((node["Resources"].get("GPU", 0) for node in nodes if node["NodeID"] == connection.node), 0))


def announce_end(connection: RayConnection, node: str, seconds: float, reason: str) -> None:
    """Tell Ray that a node will be gone in ``seconds``: what its hidden command ``ray drain-node`` does, as a preemption. Ray
    starts nothing there any more, and ends nothing. ``ClusterError`` if no such node is alive."""
    if not any(known["NodeID"] == node and known["Alive"] for known in _nodes(connection)):  # Ray takes a notice for any id
        raise ClusterError("no such node is alive", subject=f"node {node}", remedy="`ray list nodes` lists them")
    preemption = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")

    def drain() -> tuple[bool, str]:
        gcs = GcsClient(address=connection.address)
        accepted, why = gcs.drain_node(node, preemption, reason, int((SYSTEM.now() + seconds) * 1000))
        return bool(accepted), str(why)

    accepted, why = connection.ask(drain, _ANSWER)
    if not accepted:
        raise ClusterError(f"Ray does not accept the notice: {why}", subject=f"node {node}")


def alive_nodes() -> set[str]:
    """The ids of the nodes alive. Waits for the head node without a deadline."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def leaving_nodes() -> set[str]:
    """The ids of the nodes that will be removed, by notice of a cloud, an autoscaler or ``announce_end``. Waits as
    ``alive_nodes``."""
    return {*state.get_draining_nodes()}


def survey() -> dict[str, float]:
    """The nodes alive and the resources (``CPU``, ``GPU``, ...) of the Ray cluster that this machine belongs to.

    ``ClusterError`` if there is none.
    """
    with connected() as connection:
        alive = sum(bool(node["Alive"]) for node in _nodes(connection))
        return {"nodes": float(alive), **connection.ask(ray.cluster_resources, _ANSWER)}


def _nodes(connection: RayConnection) -> list[dict[str, Any]]:
    return connection.ask(ray.nodes, _ANSWER)
