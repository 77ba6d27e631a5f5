"""A real Ray cluster whose nodes, node workers and coordinator are processes of this machine, which drills kill and freeze."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import ray
from helpers.polling import wait_until
from ray.cluster_utils import Cluster

import raystow
from raystow.workers.node.actor import NAMESPACE, holders
from raystow.workers.protocol.messages import Holding

DEADLINE = 90.0
"""Seconds after which a wait fails."""


class DrillCluster:
    """A head that runs no training, and nodes that drills add and remove by name.

    Each node is a zone of its own, and has 100 units of a resource with its name, which places actors on it. ``head``: more
    arguments for the head's ``Cluster.add_node``.
    """

    def __init__(self, **head: Any) -> None:
        arguments = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 << 20, **head}
        self.cluster = Cluster(initialize_head=True, head_node_args=arguments)
        self.nodes: dict[str, Any] = {}
        self._seen: set[psutil.Process] = set()
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level=logging.ERROR)

    def add(self, *names: str) -> None:
        """Start nodes, and wait until Ray has registered them."""
        for name in names:
            self.nodes[name] = self.cluster.add_node(
                num_cpus=1, object_store_memory=80 << 20, resources={name: 100}, labels={"zone": f"zone of {name}"}
            )

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the raylet of a node, or of the head ("head"), and all processes that it started."""
        node = self.cluster.head_node if name == "head" else self.nodes[name]
        found: list[psutil.Process] = []
        for started in [info.process.pid for infos in node.all_processes.values() for info in infos]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(started)
                found += [process, *process.children(recursive=True)]
        self._seen |= {*found}
        return found

    def actors(self, name: str, kind: str) -> list[psutil.Process]:
        """Return the processes on a node that are actors of the class ``kind``."""
        found = []
        for process in self.processes(name):
            with contextlib.suppress(psutil.NoSuchProcess):
                if f"ray::{kind}" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def node_worker(self, name: str) -> psutil.Process:
        """Wait for raystow's process on a node, and return it."""
        wait_until(lambda: len(self.actors(name, "NodeActor")) == 1, f"a node worker on {name}")
        return self.actors(name, "NodeActor")[0]

    def coordinator(self) -> psutil.Process:
        """Wait for the coordinator's process, and return it. A drill has only one repository."""
        wait_until(lambda: len(self.actors("head", "CoordinatorActor")) == 1, "a coordinator")
        return self.actors("head", "CoordinatorActor")[0]

    def kill(self, name: str) -> None:
        """Send SIGKILL to all processes of a node, as if its machine lost power."""
        for process in self.processes(name):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)

    def kill_raylet(self, name: str) -> list[psutil.Process]:
        """Send SIGKILL to a raylet only, so that Ray declares the node dead; return the other processes of the node."""
        others = [process for process in self.processes(name) if "raylet" not in process.name()]
        node = self.nodes.pop(name)
        self.cluster.worker_nodes.remove(node)
        for info in node.all_processes["raylet"]:
            info.process.kill()
            info.process.wait()
        return others

    def freeze(self, name: str) -> list[psutil.Process]:
        """Send SIGSTOP to all processes of a node, as if its machine hung; return them for ``wake``."""
        stopped = self.processes(name)
        send(signal.SIGSTOP, *stopped)
        return stopped

    def copied(self, uri: str) -> None:
        """Wait until every part of the newest version is in the memory of two nodes."""
        repository = raystow.open(uri)
        entry = repository.root().versions[-1]
        parts = len(repository.at(entry).record.fragments)

        def has_two_copies() -> bool:
            found = asyncio.run(holders(repository.id)).get(entry.attempt, {})
            return len(found) == parts and all(len(nodes) >= 2 for nodes in found.values())

        wait_until(has_two_copies, f"two copies in memory of each part of version {entry.id}")

    def holdings(self, name: str, repository: str) -> list[Holding]:
        """Return the objects of a repository in a node's memory, oldest first."""
        held: list[Holding] = self._worker(name, "holdings", repository)
        return held

    def partner(self, name: str) -> str:
        """Return the node that has the copies of a node's parts."""
        (partner,) = self._worker(name, "copies").partners
        return next(other for other, node in self.nodes.items() if node.node_id == partner)

    def check_nothing_left(self, uri: str, ranks: Mapping[str, int]) -> None:
        """Assert that dead processes and restores left nothing behind.

        Nodes run as many ranks as ``ranks`` says, which have only their rings. Node workers have these rings, and packs of the
        size that they report as kept or reusable. All other processes that were started have ended.
        """
        repository = raystow.open(uri).id

        for name in self.nodes:
            if self.actors(name, "NodeActor"):
                self._check_memory(name, repository, ranks[name])
        wait_until(lambda: not self._strays(), "the processes of dead nodes are gone")

    def _check_memory(self, name: str, repository: str, ranks: int) -> None:
        difference = ""

        def matches() -> bool:
            nonlocal difference
            holdings = self.holdings(name, repository)
            kept = sum(pages(size) for held in holdings for part in held.parts.values() for size in part.objects.values())
            found = [memfds(process.pid) for process in (self.node_worker(name), *self.actors(name, "Rank"))]
            expected = [(ranks, kept + self._worker(name, "status").spare)] + [(1, 0)] * ranks
            difference = f"rings and packs of {name}'s worker and ranks: {found}, not {expected}; {holdings}"
            return found == expected

        wait_until(matches, lambda: difference, 30)

    def _worker(self, name: str, method: str, *args: Any) -> Any:
        """Return the answer of a node worker."""
        actor = ray.get_actor(f"node-{self.nodes[name].node_id}", NAMESPACE)
        return ray.get(getattr(actor, method).remote(*args), timeout=10)

    def _strays(self) -> list[psutil.Process]:
        """Return living processes that belong to no living node."""
        here = {process for name in ("head", *self.nodes) for process in self.processes(name)}
        return [process for process in self._seen - here if alive(process)]

    def close(self) -> None:
        """Shut everything down; raise ``AssertionError`` if a process of any node of the cluster is still alive."""
        for name in ("head", *self.nodes):
            self.processes(name)
        ray.shutdown()
        self.cluster.shutdown()
        try:
            wait_until(lambda: not any(alive(process) for process in self._seen), "all processes are gone", 30)
        finally:
            send(signal.SIGKILL, *self._seen)


def alive(process: psutil.Process) -> bool:
    """Return whether a process runs or is stopped; a zombie does not count."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def send(number: signal.Signals, *processes: psutil.Process) -> None:
    """Send a signal to the processes that are alive."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def wake(*processes: psutil.Process) -> None:
    """Send SIGCONT to frozen processes."""
    send(signal.SIGCONT, *processes)


@contextlib.contextmanager
def frozen(process: psutil.Process) -> Iterator[None]:
    """Send SIGSTOP now, and SIGCONT at the end of the block."""
    send(signal.SIGSTOP, process)
    try:
        yield
    finally:
        wake(process)


def memfds(pid: int) -> tuple[int, int]:
    """Return the number of staging rings that a process has open or mapped, and the bytes of its packs in whole pages."""
    files: dict[tuple[str, str], int] = {}  # name and inode -> size
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            files[os.readlink(link), str(link.stat().st_ino)] = pages(link.stat().st_size)
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, _, _, _, inode, *name = line.split(maxsplit=5)
        begin, end = (int(address, 16) for address in span.split("-"))
        files.setdefault(("".join(name), inode), end - begin)
    packs = [size for (name, _), size in files.items() if name.startswith("/memfd:raystow-pack")]
    return sum(name.startswith("/memfd:raystow-ring") for name, _ in files), sum(packs)


def pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
