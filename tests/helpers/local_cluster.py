"""Saves without Ray: real node workers and a real coordinator, as plain classes of this process.

    with LocalCluster("memory://test") as cluster:
        version = cluster.save({"w": torch.ones(3)}, step=1)                        # one rank
        version = cluster.save_all([state_of_rank_0, state_of_rank_1], step=2)      # several ranks, each on its own thread

With ``process="node"`` the node workers are separate processes, since no process can open its own device memory by IPC.
The parts of Ray (calls between processes, restarts) are missing; planning, staging through the ring, coding, packing, uploading
and committing are the production code. ``nodes`` node workers serve the ranks in turn.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from msgspec.structs import replace

from helpers.node_process import NodeProcess, PortServer
from helpers.processes import incarnation
from raystow import __version__
from raystow.orchestrator.coordinator.attempts import Coordinator
from raystow.orchestrator.coordinator.delta_schedule import Delta
from raystow.orchestrator.coordinator.requests import handle
from raystow.state.assignment import GpuCoding
from raystow.state.lossy.profiles import Lossy
from raystow.state.lossy.rules import RuleSelector
from raystow.state.planner import Planner, plan_save
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import RaystowError
from raystow.storage.format import key_files, values
from raystow.storage.format.parts import part_key, part_number
from raystow.storage.format.root import Entry
from raystow.storage.repository import create_repository
from raystow.storage.runtime.clock import SYSTEM, Clock
from raystow.storage.versions.version import Version
from raystow.workers.cache.tier import MemoryTier
from raystow.workers.node.node import Node
from raystow.workers.protocol.coordinator_client import CoordinatorClient
from raystow.workers.protocol.messages import CoordinatorRequest, JoinRun, Message, OnDifference, OpenSession, RankSaveRequest
from raystow.workers.shm.ring import SLOT
from raystow.workers.staging.client import Staging
from raystow.workers.staging.plan import SaveOrder
from raystow.workers.staging.progress import SaveProgress

_TICK = 0.05  # seconds between checks of deadlines


class LocalPort(CoordinatorClient):
    """A coordinator that several threads call directly. The thread that finds a complete attempt commits it."""

    def __init__(self, coordinator: Coordinator, committer: Committer) -> None:
        self._core, self._committer = coordinator, committer
        self._changed = threading.Condition()

    def call(self, request: CoordinatorRequest[Any], timeout: float) -> Message:
        with self._changed:
            try:
                answer = handle(self._core, request)
            finally:
                self._keep()
            while (found := answer()) is None:
                self._changed.wait(_TICK)
                self._keep()
        return found

    def _keep(self) -> None:
        """Run the coordinator's upkeep under the lock: commits, deadlines, and the objects of abandoned attempts."""
        while (attempt := self._core.next_commit()) is not None:
            outcome: Entry | RaystowError
            try:
                outcome = self._committer.commit(self._core.record(attempt)).entry
            except RaystowError as error:
                outcome = error
            self._core.settled(attempt, outcome)
        self._core.tick()
        for id, token in self._core.abandoned():
            self._committer.discard(id, token)
        self._changed.notify_all()


class KnownStall(SaveProgress):
    """A save that reports a given delay of the training."""

    def __init__(self, step: int, stall: float | None) -> None:
        super().__init__(step)
        self._stall = stall

    @property
    def stall(self) -> float | None:  # type: ignore[override]  # None: unknown
        return self._stall


class LocalCluster:
    """``uri``: the repository, created if missing. ``memory``: bytes for each rank. ``threads``: coding threads of a node.
    ``host``: the CUDA device that codes tensors in host memory; ``raw``: whether the node may store them without coding."""

    def __init__(
        self,
        uri: str,
        *,
        nodes: int = 1,
        threads: int = 2,
        memory: int = 64 << 20,
        codec: str = "auto",
        process: Literal["training", "node"] = "training",
        lossy: Mapping[str, RuleSelector] | str | None = None,
        delta: Delta = 0,
        host: int | None = None,
        raw: bool = False,
        on_difference: OnDifference = "warn",
        clock: Clock = SYSTEM,
    ) -> None:
        self._gpus, self._raw = GpuCoding(codec != "cpu", host), raw
        self.repository = create_repository(uri, clock=clock)
        self.uri = self.repository.uri
        self.committer = Committer(self.repository, f"local-{SYSTEM.token()}", key_files.signer())
        self.coordinator = Coordinator(self.committer, clock, writer={"raystow": __version__})
        self._port = LocalPort(self.coordinator, self.committer)
        self._memory, self._codec, self._process, self._lossy = memory, codec, process, Lossy.of(lossy)
        self._delta, self._on_difference = delta, on_difference
        self._threads, self._ports = threads, PortServer(self._port) if process == "node" else None
        self._nodes = [self._new_node(i) for i in range(nodes)]
        self._numbers, self._processes = itertools.count(1), itertools.count(1)
        self._lock = threading.Lock()
        self._openings: dict[int, OpenSession] = {}  # by rank
        self._stagings: dict[int, tuple[int, Staging]] = {}  # rank -> world size, staging

    def save(
        self,
        state: dict[str, Any],
        *,
        step: int,
        rank: int = 0,
        world_size: int = 1,
        metrics: dict[str, Any] | None = None,
        timeout: float = 60.0,
        stall: float | None = None,
        parts: tuple[str, ...] = (),
        part: str = "",
    ) -> Version:
        """Save one rank's state and wait for the version. With ``world_size`` > 1, every rank calls this on its own thread. So
        does each of the ``parts`` that ranks declare, with its own name as ``part``.

        Raises ``SaveFailed`` if the save fails; it is given up ``timeout`` seconds after the first rank began. ``stall``: the
        seconds that the save reports as its delay of the training.
        """
        planner = Planner(self._lossy)
        state = {part_key(part): state} if part else state
        plan = plan_save(state, rank=rank, world_size=world_size, gpus=self._gpus, planner=planner)
        rank = part_number(part) if part else rank
        staging = self._staging(rank, world_size, part)
        request = first_save(
            self._openings[rank],
            save=next(self._numbers),
            step=step,
            timeout=timeout,
            metrics={name: values.dumps(value) for name, value in (metrics or {}).items()},
            delta=self._delta,
            lossy=self._lossy.texts(),
            on_difference=self._on_difference,
            parts=",".join(parts),
        )
        outcomes: queue.SimpleQueue[Entry | RaystowError] = queue.SimpleQueue()
        progress = KnownStall(step, stall)
        staging.submit(SaveOrder(request, plan, progress, outcomes.put))
        outcome = outcomes.get(timeout=timeout + 30)
        progress.end(outcome if isinstance(outcome, RaystowError) else "")
        if isinstance(outcome, RaystowError):
            raise outcome
        return Version(self.repository.store, outcome, self.repository.id)

    def save_all(self, states: Sequence[dict[str, Any]], *, step: int, metrics: dict[str, Any] | None = None) -> Version:
        """Save the states of all ranks at once, ``states[rank]`` each, and wait for the version."""
        world = len(states)
        for rank in range(world):  # all join before the first one saves, as processes do in their Checkpointer
            self._staging(rank, world)
        with ThreadPoolExecutor(world, "rank") as ranks:
            saves = [
                ranks.submit(self.save, state, step=step, rank=rank, world_size=world, metrics=metrics)
                for rank, state in enumerate(states)
            ]
            versions = [save.result() for save in saves]
        return versions[0]

    def save_with_parts(self, state: dict[str, Any], parts: Mapping[str, dict[str, Any]], *, step: int) -> Version:
        """Save the state of one rank and of parts, by name, at once, and wait for the version."""
        with ThreadPoolExecutor(len(parts), "part") as threads:
            saves = [threads.submit(self.save, own, step=step, part=name) for name, own in parts.items()]
            version = self.save(state, step=step, parts=(*parts,))
            assert all(save.result() == version for save in saves)
        return version

    def close(self) -> None:
        """Close all connections, and stop accepting new ones."""
        for _, staging in self._stagings.values():
            staging.close()
        for node in self._nodes:
            node.close()
        if self._ports is not None:
            self._ports.close()

    def kill_node(self, number: int) -> None:
        """Kill the process of a node worker, as the operating system would, and start another."""
        dead = self._nodes[number]
        assert isinstance(dead, NodeProcess)
        dead.kill()
        self._nodes[number] = self._new_node(number)

    def restart_node(self, number: int) -> None:
        """End a node worker of this process, and start another with empty memory."""
        for rank in [rank for rank in self._stagings if rank % len(self._nodes) == number]:
            self._stagings.pop(rank)[1].close()
        self._nodes[number].close()
        self._nodes[number] = self._new_node(number)

    def tier(self, number: int) -> MemoryTier:
        """Return the memory tier of a node worker of this process."""
        node = self._nodes[number]
        assert isinstance(node, Node)
        return node._tier

    def address(self, number: int) -> str:
        """Return the address of a node worker on this machine."""
        return self._nodes[number].address

    def _new_node(self, number: int) -> Node | NodeProcess:
        if self._ports is not None:
            return NodeProcess(f"node-{number}", self._ports.address, threads=self._threads)
        return Node(f"node-{number}", lambda *_: self._port, threads=self._threads)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _staging(self, rank: int, world_size: int, part: str = "") -> Staging:
        """Return the rank's connection; a new one, like that of a restarted process, if the node worker died or the world size
        changed."""
        with self._lock:
            known = self._stagings.get(rank)
            if known is not None and known[0] == world_size and not known[1].lost:
                return known[1]
            if known is not None:
                known[1].close()
            opening = self._openings[rank] = replace(self.opening(rank, world_size, part), process=self._process)
            staging = Staging(self.address(rank % len(self._nodes)), opening, codec=self._codec, raw=self._raw)
            self._stagings[rank] = world_size, staging
            return staging

    def opening(self, rank: int, world_size: int, part: str = "") -> OpenSession:
        """Join as a new process of the rank, and return its opening message to its node worker, for this process or another."""
        who = incarnation(SYSTEM.token(), self.repository.id, number=next(self._processes))
        self._port.ask(JoinRun(rank, who, world_size, part))
        half = self._memory // 2
        return OpenSession(self.uri, self.repository.id, rank, world_size, who, os.getpid(), half, SLOT, half, part=part)


def first_save(opening: OpenSession, **fields: Any) -> RankSaveRequest:
    """Return what the process of ``opening`` requests: its first one, unless ``fields`` say otherwise."""
    who = opening.rank, opening.world_size, opening.incarnation
    return RankSaveRequest(*who, **{"save": 1, "timeout": 60.0, **fields})
