"""Training processes for tests: actors that each hold a Checkpointer and a state made from a recipe."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import psutil
import ray

import raystow


class Rank:
    """One rank. Its state stays in its own process: tests say how to make it and what to ask of it."""

    def __init__(self, uri: str, rank: int, world_size: int, options: dict[str, Any] | None = None) -> None:
        self.checkpointer = raystow.Checkpointer(uri, rank=rank, world_size=world_size, **(options or {}))
        self.state: dict[str, Any] = {}
        self.pending: list[raystow.Pending] = []

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

    def restore(self) -> raystow.Version | None:
        return self.checkpointer.restore_latest(into=self.state)

    def pid(self) -> int:
        return os.getpid()

    def node_worker_pids(self) -> list[int]:
        """The node workers among the processes of this machine that this rank's node runs."""
        raylet = psutil.Process(os.getppid())
        return [child.pid for child in raylet.children() if "NodeActor" in " ".join(child.cmdline())]


def start(uri: str, world_size: int, *, nodes: tuple[str, ...] = ("node_a", "node_b"), **options: Any) -> list[Any]:
    """An actor for each rank, on the named nodes in turn."""
    actor = ray.remote(Rank)
    return [
        actor.options(num_cpus=0, resources={nodes[rank % len(nodes)]: 1}).remote(uri, rank, world_size, options)
        for rank in range(world_size)
    ]


def every(ranks: list[Any], method: str, *args: Any, timeout: float = 120) -> list[Any]:
    """Call a method of all ranks at once, and wait for all."""
    return ray.get([getattr(rank, method).remote(*args) for rank in ranks], timeout=timeout)
