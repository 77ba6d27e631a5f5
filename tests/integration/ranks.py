"""Training processes for tests: actors that each have a Checkpointer and a state made by a function.

Importing torch takes longer than most tests, so a process serves one test after another.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import psutil
import ray
from helpers.polling import wait_until
from ray.exceptions import RayError
from torch import distributed

import raystow
from raystow.orchestrator.client.startup import Startup
from raystow.orchestrator.coordinator.ray_client import coordinator_name
from raystow.storage.stores import open_store
from raystow.workers.node.actor import NAMESPACE

PATIENCE = 5.0  # seconds that ranks get to leave a test; the others are killed


class Rank:
    """One rank. Its state stays in its process: tests pass functions that make or inspect the state."""

    def begin(self, uri: str, rank: int, world_size: int, options: dict[str, Any]) -> None:
        """Create the Checkpointer of this rank."""
        self.checkpointer = raystow.Checkpointer(uri, rank=rank, world_size=world_size, **options)
        self.startup.wait()  # raises the exception that the first call would raise
        self.state: dict[str, Any] = {}
        self.pending: list[raystow.Pending] = []

    @property
    def startup(self) -> Startup:
        """The connection of this rank to its coordinator, over which tests call it as no public method does."""
        return self.checkpointer._startup

    def leave(self) -> bool:
        """Close the Checkpointer, and return whether another run may use this process (torch keeps the meshes of process
        groups)."""
        with contextlib.suppress(raystow.RaystowError):  # of saves that the test lets fail
            self.checkpointer.close()
        self.state, self.pending = {}, []
        return not distributed.is_initialized()

    def do(self, what: Callable[..., Any], *args: Any) -> Any:
        """Call ``what(self, *args)`` in this process."""
        return what(self, *args)

    def set(self, recipe: Callable[..., dict[str, Any]], *args: Any) -> None:
        """Set the state to ``recipe(*args)``."""
        self.state = recipe(*args)

    def save(self, step: int, metrics: dict[str, Any] | None = None) -> None:
        """Start a save; ``result`` returns its version."""
        self.pending.append(self.checkpointer.save(self.state, step=step, metrics=metrics))

    def fence(self) -> None:
        self.checkpointer.fence()

    def result(self, timeout: float = 60) -> raystow.Version:
        """Return the version of the oldest save whose result was not requested yet."""
        return self.pending.pop(0).result(timeout)

    def restore(self, version: int | str | raystow.Version = "latest") -> raystow.Version | None:
        return self.checkpointer.restore(self.state, version)

    def pid(self) -> int:
        return os.getpid()

    def node_worker_pids(self) -> list[int]:
        """Wait for node workers on this rank's node, and return their process ids."""
        raylet = psutil.Process(os.getppid())

        def workers() -> list[int]:
            return [child.pid for child in raylet.children() if "NodeActor" in " ".join(child.cmdline())]

        wait_until(workers, "a node worker")
        return workers()


Place = tuple[str, str]
"""A cluster, and one of its nodes."""

_idle: defaultdict[Place, list[Any]] = defaultdict(list)
_busy: list[tuple[Place, Any]] = []
_runs: set[str] = set()
_ended: set[str] = set()


def start(uri: str, world_size: int, *, nodes: tuple[str, ...] = ("node_a", "node_b"), **options: Any) -> list[Any]:
    """Start an actor for each rank, on the named nodes in turn. All of them are released when the test ends."""
    ranks = [take(nodes[rank % len(nodes)]) for rank in range(world_size)]
    _runs.add(uri)
    ray.get([rank.begin.remote(uri, n, world_size, options) for n, rank in enumerate(ranks)], timeout=120)
    return ranks


def take(node: str) -> Any:
    """Return an actor on a node that belongs to no run."""
    place = _cluster(), node
    rank = _idle[place].pop() if _idle[place] else ray.remote(Rank).options(num_cpus=0, resources={node: 1}).remote()
    _busy.append((place, rank))
    return rank


def give_back() -> None:
    """End the runs of a test. Reusable ranks wait for the next test, and the others are killed. Coordinators are killed one
    test later: they still receive the departures of ranks, and Ray prints unreachable actors on this process's stdout."""
    here = _cluster()
    leaving = {rank.leave.remote(): (place, rank) for place, rank in _busy if place[0] == here}
    if leaving:
        ray.wait(list(leaving), num_returns=len(leaving), timeout=PATIENCE)
    for left, (place, rank) in leaving.items():
        try:
            _idle[place] += [rank] if ray.get(left, timeout=0) else []
        except RayError:
            ray.kill(rank)
    if leaving:
        for uri in _ended:
            with contextlib.suppress(ValueError):  # the coordinator belongs to another cluster
                ray.kill(ray.get_actor(coordinator_name(open_store(uri).uri), NAMESPACE))
        _ended.clear()
    _ended.update(_runs)
    _busy.clear()
    _runs.clear()


def every(ranks: list[Any], method: str, *args: Any, timeout: float = 120) -> list[Any]:
    """Call a method of all ranks at once, and return all results."""
    return ray.get([getattr(rank, method).remote(*args) for rank in ranks], timeout=timeout)


def save_state(ranks: list[Any], step: int, make: Callable[..., dict[str, Any]], *args: Any) -> None:
    """Set the state of all ranks to ``make(step, *args)``, save it as that step, and wait until it is durable."""
    every(ranks, "set", make, step, *args)
    every(ranks, "save", step)
    every(ranks, "result")


def _cluster() -> str:
    """Identify the connected cluster and job (a job's actors end with the job); return "" if there is no connection."""
    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_job_id()}"
