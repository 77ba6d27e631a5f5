"""A ``Checkpointer`` in memory, for callbacks of trainers."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import raystow
from helpers.local_cluster import LocalCluster
from raystow.state.objects import ObjectTree
from raystow.state.tree import flatten
from raystow.storage.errors import SaveFailed
from raystow.storage.runtime.clock import SYSTEM


class MemoryRun:
    """Keeps the state and the metrics of each step. A restore writes and reads a version of it.

    ``notice``: the number of the step at which a notice is seen. ``looks``: whether requests are seen, as the coordinator sees
    them about once a second.
    """

    def __init__(self, *, notice: int = 0, looks: bool = True) -> None:
        self._notice, self._looks, self._asked = notice, looks, False
        self._told, self._calls = (-1, False), 0
        self.saved: dict[int, tuple[dict[str, Any], dict[str, float]]] = {}
        self.waited: list[int] = []
        self.every = 1 << 62  # steps of its own interval
        self.error: SaveFailed | None = None

    def save(self, state: dict[str, Any], *, step: int, metrics: dict[str, float]) -> None:
        tree = ObjectTree(state, what="state").saved(0)
        flatten(tree)
        assert all(type(value) in (bool, int, float) for value in metrics.values())
        self.saved[step] = copy.deepcopy(tree), metrics

    def save_now(self) -> None:
        self._asked = True

    def due(self, step: int, interval: raystow.Interval | None) -> bool:
        if interval is None:
            return step % self.every == 0
        assert interval.steps is not None
        assert step < interval.steps
        if step != self._told[0]:
            self._calls += 1
            self._told = step, (self._asked and self._looks) or self._calls == self._notice
            self._asked = self._asked and not self._told[1]
        return self._told[1]

    def fence(self) -> None:
        pass

    def wait(self) -> None:
        self.waited.append(max(self.saved, default=0))
        if self.error is not None:
            raise self.error

    def restore(self, into: dict[str, Any], version: Any = "latest") -> Any:
        if not self.saved:
            return None
        step = max(self.saved)
        with LocalCluster(f"memory://{SYSTEM.token()}") as cluster:
            raystow.restore(cluster.save(copy.deepcopy(self.saved[step][0]), step=step), into)
        return SimpleNamespace(attempt="first")
