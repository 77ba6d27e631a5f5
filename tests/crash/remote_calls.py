"""Calls between the processes of a trial, in place of calls to Ray's actors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from helpers.node_process import RemotePort

from crash.tripwire import Tripwire
from raystow.orchestrator.coordinator.ray_client import RayCoordinatorClient
from raystow.storage.errors import ClusterError
from raystow.storage.runtime.clock import SYSTEM
from raystow.workers.protocol import messages

_RESTARTS = 60.0  # seconds that a call waits for a restart of the coordinator, as calls to Ray's actors do
_RETRY = 0.005


class CoordinatorPort(RayCoordinatorClient):
    """The client of a coordinator in another process; calls wait and are repeated while that restarts."""

    def __init__(self, address: Any, trip: Tripwire) -> None:
        super().__init__(str(address))
        self._actor, self._trip = RemotePort(address), trip

    def call(self, request: messages.CoordinatorRequest[Any], timeout: float) -> messages.Message:
        name, data = type(request).__name__, messages.encode(request)
        self._trip(f"before calling {name}")
        give_up = SYSTEM.monotonic() + _RESTARTS
        while True:
            try:
                answer = self._actor.handle(messages.PROTOCOL, data)
                break
            except (OSError, EOFError) as error:
                if SYSTEM.monotonic() > give_up:
                    raise ClusterError(f"the coordinator is gone: {error}") from error
                SYSTEM.sleep(_RETRY)  # the trial replaces the coordinator meanwhile, as Ray restarts an actor
        self._trip(f"after calling {name}")
        return self._decoded(request, *answer)


class Blocking:
    """An actor of coroutines that threads call."""

    def __init__(self, actor: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._actor, self._loop = actor, loop

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(getattr(self._actor, method)(*args), self._loop).result()

        return call


class NodePeers:
    """Access to the node workers' memory for other processes."""

    def __init__(self, port: str) -> None:
        self._port = port

    def at(self, node: str) -> str:
        """Return the address of a node."""
        return f"{self._port}-{node}"

    def contact(self, node: str) -> Any:
        """Return the contact of a node for calls of other nodes."""
        try:
            return RemotePort(self.at(node)).contact()
        except (OSError, EOFError) as error:
            raise ClusterError(f"does not answer: {error}", subject=f"node {node}") from error

    async def held(self, node: str, method: Callable[..., Any], repository: str) -> list[Any]:
        """Return the contents of a node's memory."""
        try:
            held: list[Any] = await asyncio.to_thread(getattr(RemotePort(self.at(node)), method.__name__), repository)
        except (OSError, EOFError):
            return []
        return held
