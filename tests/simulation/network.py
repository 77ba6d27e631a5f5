"""Simulated Ray calls between processes: delivered late, twice, or not within the caller's time limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from raystow.storage.errors import ClusterError, RaystowError
from raystow.workers.protocol.coordinator_client import CoordinatorClient
from raystow.workers.protocol.messages import CoordinatorRequest, Message

from .scheduler import Process

if TYPE_CHECKING:
    from .cluster import Cluster
    from .host import Host


class SimPort(CoordinatorClient):
    """Calls one coordinator and, after its death, its successor."""

    def __init__(self, cluster: Cluster, caller: Process) -> None:
        self._cluster, self._caller = cluster, caller
        self._host = cluster.some_host()

    def call(self, request: CoordinatorRequest[Any], timeout: float) -> Message:
        answer: Message = self._call("handle", timeout, request)
        return answer

    def _call(self, method: str, timeout: float, *args: object) -> Any:
        cluster, caller, answers = self._cluster, self._caller, list[Any]()
        end = cluster.scheduler.time + timeout

        def answer(value: object) -> None:
            """Send the answer back, unless the message is lost."""

            def arrive() -> None:
                answers.append(value)
                caller.tell()

            if not cluster.rng.chance(cluster.rates.lost_message):
                cluster.scheduler.after(self._delay(), arrive)

        self._send(method, args, answer)
        while not caller.wait(lambda: bool(answers), min(30.0, end - cluster.scheduler.time)):
            if cluster.scheduler.time >= end:
                raise ClusterError(f"no answer to {method} of {args} in {timeout:.0f} s")
            if not self._host.process.alive:
                self._host = cluster.some_host()
                self._send(method, args, answer)
        if isinstance(answers[0], RaystowError):
            raise answers[0]
        return answers[0]

    def _send(self, method: str, args: tuple[object, ...], answer: Callable[[object], None]) -> None:
        cluster, host = self._cluster, self._host
        copies = 2 if cluster.rng.chance(cluster.rates.doubled_message) else 1
        for _ in range(copies):
            if not cluster.rng.chance(cluster.rates.lost_message):
                cluster.scheduler.after(self._delay(), lambda: _deliver(host, method, args, answer))

    def _delay(self) -> float:
        rng = self._cluster.rng
        return rng.between(60.0, 1500.0) if rng.chance(self._cluster.rates.late_message) else rng.around(0.01)


def _deliver(host: Host, method: str, args: tuple[object, ...], answer: Callable[[object], None]) -> None:
    def handle() -> None:
        try:
            answer(getattr(host, method)(*args))
        except RaystowError as error:
            answer(error)

    if host.process.alive:
        host.process.spawn(handle)
