"""Simulated Ray calls between processes: delivered late, twice, or not within the caller's time limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from raystow.storage.errors import ClusterError, RaystowError
from raystow.storage.format.root import Entry
from raystow.storage.format.version_record import FragmentInfo
from raystow.workers.protocol.messages import Begin, Incarnation, RanksWarning, Ticket

from .scheduler import Process

if TYPE_CHECKING:
    from .cluster import Cluster
    from .host import Host

_ANSWER = 60.0


class SimPort:
    """A ``CoordinatorClient`` that calls one coordinator and, after its death, its successor."""

    def __init__(self, cluster: Cluster, caller: Process) -> None:
        self._cluster, self._caller = cluster, caller
        self._host = cluster.some_host()

    def begin(self, begin: Begin) -> Ticket:
        return self._call("begin", _ANSWER, begin)

    def finished(self, ticket: Ticket, rank: int, covered: int) -> None:
        self._call("finished", _ANSWER, ticket, rank, covered)

    def wait_complete(self, ticket: Ticket, warn: Callable[[str], None]) -> None:
        self._wait("wait_complete", ticket.timeout + _ANSWER, warn, ticket)

    def staged(self, ticket: Ticket, info: FragmentInfo) -> None:
        self._call("staged", _ANSWER, ticket, info)

    def fragment(self, ticket: Ticket, info: FragmentInfo, warn: Callable[[str], None]) -> Entry:
        return self._wait("fragment", ticket.timeout + 2 * _ANSWER, warn, ticket, info)

    def failed(self, ticket: Ticket, reason: str) -> None:
        self._call("failed", _ANSWER, ticket, reason)

    def rank_disconnected(self, rank: int, incarnation: Incarnation, reason: str) -> None:
        self._call("rank_disconnected", _ANSWER, rank, incarnation, reason)

    def join(self, rank: int, incarnation: Incarnation, world_size: int) -> None:
        self._call("join", _ANSWER, rank, incarnation, world_size)

    def restore(self) -> None:
        self._call("restore", _ANSWER)

    def save_failed(self, rank: int, incarnation: Incarnation, save: int, step: int, reason: str) -> bool:
        return self._call("save_failed", _ANSWER, rank, incarnation, save, step, reason)

    def _wait(self, method: str, timeout: float, warn: Callable[[str], None], *args: object) -> Any:
        """Call until the answer is no warning; a warning may come late or twice."""
        answer, told = self._call(method, timeout, *args, 0), 0
        while isinstance(answer, RanksWarning):
            told = max(told, answer.number)
            warn(answer.text)
            answer = self._call(method, timeout, *args, told)
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
                raise ClusterError(f"no answer to {method!r} in {timeout:.0f} s")
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
