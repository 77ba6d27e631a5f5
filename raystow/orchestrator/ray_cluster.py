"""Calls to actors with a deadline, and errors that are raystow's own instead of Ray's."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import ray
from ray._private.services import get_ray_address_from_environment
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from ..storage.clock import SYSTEM
from ..storage.errors import ClusterError, RaystowError

_UNAUTHENTICATED = "AuthenticationError", "InvalidAuthToken"  # in messages of Ray


def connect(address: str = "auto") -> None:
    """Connect this process to a Ray cluster, by default the one it runs on, unless it is; ``ClusterError`` if there is none."""
    if ray.is_initialized():
        return
    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False, logging_level="warning")
    except (OSError, RayError) as error:
        if any(sign in str(cause) for cause in (error, error.__cause__, error.__context__) for sign in _UNAUTHENTICATED):
            remedy = "set RAY_AUTH_MODE=token, and give this process the token of the cluster"
            raise ClusterError("the Ray cluster refuses this process, which shows no valid token", remedy=remedy) from error
        remedy = "start one (`ray start --head`, or ray.init()), or read with raystow.open"
        raise ClusterError(f"no Ray cluster is running here: {error}", remedy=remedy) from error
    except RuntimeError as error:  # Ray or Python has another version there
        what = "this process cannot join the Ray cluster that is running here"
        raise ClusterError(f"{what}: {error}", remedy="use the cluster's versions of Ray and Python") from error


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """``connect``, and close a connection that was made for this alone."""
    before = ray.is_initialized()
    connect()
    try:
        yield
    finally:
        if not before:
            ray.shutdown()


def _knock(address: str) -> None:
    """``OSError`` if nobody listens where a cluster was last seen: Ray itself would go on asking there for minutes."""
    where = (get_ray_address_from_environment("auto", None) or "") if address == "auto" else address
    host, _, port = where.rpartition(":")
    if host and port.isdecimal() and "://" not in where:
        socket.create_connection((host, int(port)), timeout=5).close()


def call(ref: ray.ObjectRef, timeout: float, who: str) -> Any:
    """The result of a remote call within ``timeout`` seconds. A frozen actor counts as alive for Ray: so never without."""
    try:
        return ray.get(ref, timeout=timeout)
    except RayTaskError as error:
        if isinstance(error.cause, RaystowError):
            raise error.cause from None
        raise ClusterError(f"failed: {error.cause!r}", subject=who) from error
    except GetTimeoutError as error:
        raise ClusterError(f"did not answer within {timeout:.0f} s", subject=who, remedy="look at its log, or kill it") from error
    except RayActorError as error:
        raise ClusterError(f"died: {str(error).strip().splitlines()[-1]}", subject=who) from error
    except RayError as error:
        raise ClusterError(str(error), subject=who) from error


def node_here() -> str:
    """Ray's id of this node."""
    return str(ray.get_runtime_context().get_node_id())


def job_here() -> str:
    """Ray's id of the job of this process."""
    return str(ray.get_runtime_context().get_job_id())


def run_here(role: str = "process") -> str:
    """This process for people: its role, host and job, and the time now."""
    now = datetime.fromtimestamp(SYSTEM.now(), timezone.utc)
    return f"{role} {os.getpid()} on {socket.gethostname()}, job {job_here()}, since {now:%Y-%m-%d %H:%M:%S} UTC"


def gpus_here() -> int:
    """The GPUs of this node, as Ray counts them: those of all its workers, however few of them this process sees."""
    here = ray.get_runtime_context().get_node_id()
    return int(next((node["Resources"].get("GPU", 0) for node in ray.nodes() if node["NodeID"] == here), 0))


def announce_end(node: str, seconds: float, reason: str) -> None:
    """Tell Ray that a node will be gone in ``seconds``: what its hidden command ``ray drain-node`` does, as a preemption. Ray
    starts nothing there any more, and ends nothing. ``ClusterError`` if no such node is alive."""
    if not any(known["NodeID"] == node and known["Alive"] for known in ray.nodes()):  # Ray takes a notice for any id
        raise ClusterError("no such node is alive", subject=f"node {node}", remedy="`ray list nodes` lists them")
    gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
    preemption = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    try:
        accepted, why = gcs.drain_node(node, preemption, reason, int((SYSTEM.now() + seconds) * 1000))
    except RayError as error:
        raise ClusterError(f"Ray does not accept the notice: {error}", subject=f"node {node}") from error
    if not accepted:
        raise ClusterError(f"Ray does not accept the notice: {why}", subject=f"node {node}")


def survey() -> dict[str, float]:
    """The nodes alive and the resources (``CPU``, ``GPU``, ...) of the Ray cluster that this machine belongs to.

    ``ClusterError`` if there is none.
    """
    with connected():
        alive = sum(bool(node["Alive"]) for node in ray.nodes())
        return {"nodes": float(alive), **ray.cluster_resources()}
