"""Training processes for tests: actors that each hold a Checkpointer and a state made from a recipe.

To load torch takes a process longer than most tests, so it serves one test after the other.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import psutil
import ray
from polling import wait_until
from ray.exceptions import RayError
from torch import distributed

import raystow
from raystow.orchestrator.coordinator.ray_client import coordinator_name
from raystow.storage.stores import open_store
from raystow.workers.node.actor import NAMESPACE

PATIENCE = 5.0  # seconds for ranks to leave a test; those that do not are killed


class Rank:
    """One rank. Its state stays in its own process: tests say how to make it and what to ask of it."""

    def begin(self, uri: str, rank: int, world_size: int, options: dict[str, Any]) -> None:
        """Be this rank of this run."""
        self.checkpointer = raystow.Checkpointer(uri, rank=rank, world_size=world_size, **options)
        self.checkpointer._startup.wait()  # it raises what the first call would
        self.state: dict[str, Any] = {}
        self.pending: list[raystow.Pending] = []

    def leave(self) -> bool:
        """Forget the run; whether this process may be of another. Not after a process group: torch remembers its meshes."""
        self.checkpointer.close()
        self.state, self.pending = {}, []
        return not distributed.is_initialized()

    def do(self, what: Callable[..., Any], *args: Any) -> Any:
        """Call ``what(self, *args)`` here."""
        return what(self, *args)

    def set(self, recipe: Callable[..., dict[str, Any]], *args: Any) -> None:
        """Make the state."""
        self.state = recipe(*args)

    def save(self, step: int, metrics: dict[str, Any] | None = None) -> None:
        """Begin to save; ``result`` tells what became of it."""
        self.pending.append(self.checkpointer.save(self.state, step=step, metrics=metrics))

    def fence(self) -> None:
        self.checkpointer.fence()

    def result(self, timeout: float = 60) -> raystow.Version:
        """The version of the oldest save not yet asked for."""
        return self.pending.pop(0).result(timeout)

    def restore(self, version: int | str | raystow.Version = "latest") -> raystow.Version | None:
        return self.checkpointer.restore(self.state, version)

    def pid(self) -> int:
        return os.getpid()

    def node_worker_pids(self) -> list[int]:
        """The node workers among the processes of this machine that this rank's node runs, once there is one."""
        raylet = psutil.Process(os.getppid())

        def workers() -> list[int]:
            return [child.pid for child in raylet.children() if "NodeActor" in " ".join(child.cmdline())]

        wait_until(workers, "a node worker")
        return workers()


Place = tuple[str, str]
"""A cluster, and a node of it."""

_idle: defaultdict[Place, list[Any]] = defaultdict(list)
_busy: list[tuple[Place, Any]] = []
_runs: set[str] = set()
_ended: set[str] = set()


def start(uri: str, world_size: int, *, nodes: tuple[str, ...] = ("node_a", "node_b"), **options: Any) -> list[Any]:
    """An actor for each rank, on the named nodes in turn. All leave with the end of the test."""
    ranks = [take(nodes[rank % len(nodes)]) for rank in range(world_size)]
    _runs.add(uri)
    ray.get([rank.begin.remote(uri, n, world_size, options) for n, rank in enumerate(ranks)], timeout=120)
    return ranks


def take(node: str) -> Any:
    """An actor on a node that is of no run yet."""
    place = _cluster(), node
    rank = _idle[place].pop() if _idle[place] else ray.remote(Rank).options(num_cpus=0, resources={node: 1}).remote()
    _busy.append((place, rank))
    return rank


def give_back() -> None:
    """End the runs of a test: a rank that can begin anew waits for the next test, and the others die. The coordinators die a test
    later: they still hear who has gone, and Ray tells on this process's stdout whom it cannot reach."""
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
            with contextlib.suppress(ValueError):  # it is of another cluster
                ray.kill(ray.get_actor(coordinator_name(open_store(uri).uri), NAMESPACE))
        _ended.clear()
    _ended.update(_runs)
    _busy.clear()
    _runs.clear()


def every(ranks: list[Any], method: str, *args: Any, timeout: float = 120) -> list[Any]:
    """Call a method of all ranks at once, and wait for all."""
    return ray.get([getattr(rank, method).remote(*args) for rank in ranks], timeout=timeout)


def save_state(ranks: list[Any], step: int, make: Callable[..., dict[str, Any]], *args: Any) -> None:
    """Give all ranks the state ``make(step, *args)``, save it as that step, and wait until it is durable."""
    every(ranks, "set", make, step, *args)
    every(ranks, "save", step)
    every(ranks, "result")


def _cluster() -> str:
    """The one that this process is connected to, and as which job: with the job end its actors. Empty if there is none."""
    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_job_id()}"
