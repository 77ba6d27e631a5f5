"""Launchers of ``faults.py``: they start the training processes, restart them when one has ended, and kill them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_ranks
from drills.drill_cluster import DrillCluster
from fault_ranks import RANKS, Place

Event = dict[str, Any]


class Launcher(ABC):
    """A launcher that starts all ranks, and restarts all of them when one has ended."""

    def __init__(self, saver: str, uri: str, folder: Path) -> None:
        self._saver, self._uri, self._folder = saver, uri, folder
        self._log, self._kills = folder / "log.jsonl", 0
        self._log.touch()

    @abstractmethod
    def start(self) -> None:
        """Start all ranks."""

    @abstractmethod
    def ended(self) -> bool:
        """Return whether a rank has ended that no other component restarts."""

    @abstractmethod
    def stop(self) -> None:
        """End all ranks."""

    def kill_node(self) -> None:
        """Kill the machine of the last rank with all its processes."""
        self.kill_rank()

    def close(self) -> None:
        """End everything."""
        self.stop()

    def kill_rank(self) -> None:
        """Kill the last rank."""
        self._kills += 1
        self._kill(RANKS - 1)

    @property
    def crashes(self) -> int:
        """Number of restarts of the training that were not caused by a kill."""
        starts = len([one for one in self.events("started") if one["rank"] == 0])
        return max(0, starts - 1 - self._kills)

    def events(self, event: str) -> list[Event]:
        """Return the events of one kind so far."""
        return [line for line in map(json.loads, self._log.read_text().splitlines()) if line["event"] == event]

    def stacks(self) -> list[str]:
        """Return the stack of each rank."""
        return [f"rank {rank}: {fault_ranks.stack_of(self._folder, rank, self._pid(rank))}" for rank in range(RANKS)]

    def until(self, reached: Callable[[], bool], patience: float) -> bool:
        """Supervise the ranks until a condition holds; return False if it does not hold in time."""
        end = time.monotonic() + patience
        while not reached():
            if time.monotonic() > end:
                return False
            if self.ended():
                self.stop()
                self.start()
            time.sleep(0.05)
        return True

    def _pid(self, rank: int) -> int:
        return int([one["pid"] for one in self.events("started") if one["rank"] == rank][-1])

    def _kill(self, rank: int) -> None:
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(self._pid(rank), 9)


class Processes(Launcher):
    """Ranks without Ray, as torchrun starts them. The only process of a machine is its rank."""

    def __init__(self, saver: str, uri: str, folder: Path) -> None:
        super().__init__(saver, uri, folder)
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._starts = 0

    def start(self) -> None:
        """See ``Launcher``."""
        self._starts += 1
        environment = {**os.environ, "FAULTS_GROUP": f"file://{self._folder}/group-{self._starts}"}
        for rank in range(RANKS):
            command = [sys.executable, str(Path(__file__).with_name("faults.py")), "rank", self._saver, self._uri]
            command += [str(rank), str(self._folder)]
            self._ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))

    def ended(self) -> bool:
        """See ``Launcher``."""
        return any(rank.poll() is not None for rank in self._ranks)

    def stop(self) -> None:
        """See ``Launcher``."""
        for rank in self._ranks:
            rank.kill()
            rank.wait()
        self._ranks = []


class OnRay(Launcher):
    """Ranks on two nodes of a Ray cluster; a node that was killed is replaced."""

    def __init__(self, saver: str, uri: str, folder: Path) -> None:
        super().__init__(saver, uri, folder)
        self._cluster, self._nodes = DrillCluster(), ["a", "b"]
        self._cluster.add(*self._nodes)

    def kill_node(self) -> None:
        """See ``Launcher``."""
        self._kills += 1
        last = self._nodes.index(self._last_node())
        self._cluster.kill(self._nodes[last])
        self._nodes[last] = "c"
        self._cluster.add("c")

    def close(self) -> None:
        """See ``Launcher``."""
        self.stop()
        with contextlib.suppress(AssertionError):  # a process may end too slowly for the check of the drills
            self._cluster.close()

    def _last_node(self) -> str:
        pid = self._pid(RANKS - 1)
        return next(name for name in self._nodes if any(one.pid == pid for one in self._cluster.processes(name)))


class Tasks(OnRay):
    """Each rank is a Ray task."""

    def __init__(self, saver: str, uri: str, folder: Path) -> None:
        super().__init__(saver, uri, folder)
        self._tasks: list[Any] = []

    def start(self) -> None:
        """See ``Launcher``."""
        import ray

        task = ray.remote(num_cpus=0, max_retries=0)(fault_ranks.run)
        for rank in range(RANKS):
            place = Place(self._saver, self._uri, rank, self._folder)
            self._tasks.append(task.options(resources={self._nodes[rank]: 1}).remote(place))

    def ended(self) -> bool:
        """See ``Launcher``."""
        import ray

        return bool(ray.wait(self._tasks, timeout=0)[0])

    def stop(self) -> None:
        """See ``Launcher``."""
        import ray

        for task in self._tasks:
            ray.cancel(task, force=True)
        ray.wait(self._tasks, num_returns=len(self._tasks), timeout=30)
        self._tasks = []


class RayTrain(OnRay):
    """Ranks that Ray Train starts; its driver is restarted if it ends."""

    def start(self) -> None:
        """See ``Launcher``."""
        command = [sys.executable, str(Path(__file__).with_name("faults.py")), "ray-train", self._uri, str(self._folder)]
        environment = {**os.environ, "RAY_ADDRESS": self._cluster.cluster.address}
        output = (self._folder / "driver").open("ab")
        self._driver = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def ended(self) -> bool:
        """See ``Launcher``."""
        return self._driver.poll() is not None

    def stop(self) -> None:
        """See ``Launcher``."""
        self._driver.kill()
        self._driver.wait()


LAUNCHERS: dict[str, type[Launcher]] = {"raystow": Tasks, "ray.train.report": RayTrain}
"""Launcher of each saver; ``Processes`` for the others."""
