"""Starts the actors that a rank needs while its program goes on."""

from __future__ import annotations

import os
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FuturesTimeout

from ...storage import background
from ...storage.errors import ClusterError, StateError
from ...workers.node.actor import node_actor
from ...workers.protocol.messages import PROTOCOL, CoordinatorStarted, JoinRun, StartRun
from .. import ray_cluster
from ..coordinator.ray_client import RayCoordinatorClient

ACTOR_START = 120.0
"""Seconds that an actor may take to start."""


def node_address() -> str:
    """Return the address of this node's worker, which is started if there is none."""
    address: str = ray_cluster.call(node_actor(RayCoordinatorClient).address.remote(PROTOCOL), ACTOR_START, "node worker")
    return address


class Startup:
    """Starts the coordinator of ``uri`` and this node's worker, and registers the rank, on a thread of its own.

    Attributes:
        uri: The repository.
        port: The coordinator.
    """

    def __init__(self, uri: str, rank: int, world_size: int, run: StartRun) -> None:
        self.uri, self._rank, self._world_size = uri, rank, world_size
        self._pid, self._process = os.getpid(), ray_cluster.run_here()
        self.port = RayCoordinatorClient(uri)
        node_actor(RayCoordinatorClient)  # is ready when the first save connects to it
        self._started: Future[CoordinatorStarted] = Future()
        background.start("raystow-startup", self._run, run)

    def wait(self) -> CoordinatorStarted:
        """Wait until the coordinator has started and knows this rank.

        Raises:
            ClusterError: It does not start.
            StoreError: It cannot read or write the store.
            UnsafeStore: The store has no atomic conditional writes.
            StateError: This is a child of the process that made the Checkpointer. It has none of its threads.
        """
        if os.getpid() != self._pid:
            what = f"this Checkpointer belongs to process {self._pid}, from which this one was forked"
            raise StateError(what, subject=self.uri, remedy="make another one, in a process that is started by spawn")
        try:
            return self._started.result(2 * ACTOR_START)
        except FuturesTimeout:
            raise ClusterError(f"did not start within {2 * ACTOR_START:.0f} s", subject=f"coordinator of {self.uri}") from None

    @property
    def member(self) -> JoinRun:
        """The rank and its process. Waits, and raises, as ``wait``."""
        self.wait()
        return self._member

    def _run(self, run: StartRun) -> None:
        try:
            answer = self.port.start(run, ACTOR_START)
            self._member = JoinRun(self._rank, f"{answer.turn}@{self._process}", self._world_size)
            self.port.join(self._member)
            self._started.set_result(answer)
        except BaseException as error:
            self._started.set_exception(error)
