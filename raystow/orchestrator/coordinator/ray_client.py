"""Finds or starts the coordinator actor of a repository, and calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from msgspec.structs import replace

from ...storage.coding.digest import stored_digest
from ...storage.format.root import Entry
from ...storage.format.version_record import FragmentInfo, PackInfo
from ...workers.node.actor import NAMESPACE
from ...workers.protocol.messages import (
    PROTOCOL,
    Acknowledged,
    AwaitRanks,
    Begin,
    Committed,
    JoinRun,
    Message,
    NoVersion,
    PartFailed,
    PartStaged,
    PartStored,
    RankDisconnected,
    RankFinished,
    RankSaveFailed,
    RestoreChoice,
    RestoreVote,
    Ticket,
    decode,
    encode,
    shortened,
)
from ..ray_cluster import call
from .actor import CoordinatorActor

if TYPE_CHECKING:
    from ray.actor import ActorHandle

COORDINATOR = "coordinator-"
"""The prefix of the actor names of coordinators."""

_ANSWER = 60.0  # seconds within which a call that does not wait for others must be answered


_Answer = TypeVar("_Answer", bound=Message)


class RayCoordinatorClient:
    """The coordinator of one repository, as ranks and node workers call it: a ``CoordinatorClient``."""

    def __init__(self, uri: str) -> None:
        self._uri, self._actor = uri, coordinator_actor(uri)

    def begin(self, begin: Begin) -> Ticket:
        return self._ask(begin, Ticket)

    def finished(self, ticket: Ticket, rank: int, covered: int) -> None:
        self._ask(RankFinished(ticket, rank, covered), Acknowledged)

    def wait_complete(self, ticket: Ticket) -> None:
        self._ask(AwaitRanks(ticket), Acknowledged, ticket.timeout + _ANSWER)

    def staged(self, ticket: Ticket, info: FragmentInfo, packs: Sequence[PackInfo]) -> None:
        self._ask(PartStaged(ticket, info, tuple(packs)), Acknowledged)

    def fragment(self, ticket: Ticket, info: FragmentInfo, packs: Sequence[PackInfo]) -> Entry:
        return self._ask(PartStored(ticket, info, tuple(packs)), Committed, ticket.timeout + 2 * _ANSWER).entry

    def failed(self, ticket: Ticket, reason: str) -> None:
        self._ask(PartFailed(ticket, shortened(reason)), Acknowledged)

    def rank_disconnected(self, rank: int, incarnation: str, reason: str) -> None:
        self._ask(RankDisconnected(rank, incarnation, reason), Acknowledged)

    def join(self, rank: int, incarnation: str, world_size: int) -> None:
        self._ask(JoinRun(rank, incarnation, world_size), Acknowledged)

    def settle(self, vote: RestoreVote) -> RestoreChoice | None:
        """See ``restore.rounds``. Waits for the other ranks."""
        vote = replace(vote, damage=shortened(vote.damage), error=shortened(vote.error))
        data, records = self._call("handle_vote", vote, vote.timeout + 2 * _ANSWER)
        answer: RestoreChoice | NoVersion = decode(data, RestoreChoice, NoVersion)  # type: ignore[assignment]
        if isinstance(answer, NoVersion):
            return None
        if records is None:
            return answer
        return answer.with_records(call(records, _ANSWER, f"coordinator of {self._uri}"))

    def save_failed(self, rank: int, incarnation: str, save: int, step: int, reason: str) -> None:
        self._ask(RankSaveFailed(rank, incarnation, save, step, shortened(reason)), Acknowledged)

    def _ask(self, request: Message, expected: type[_Answer], timeout: float = _ANSWER) -> _Answer:
        return decode(self._call("handle", request, timeout), expected)

    def _call(self, method: str, request: Message, timeout: float) -> Any:
        sent = getattr(self._actor, method).remote(PROTOCOL, encode(request))
        return call(sent, timeout, f"coordinator of {self._uri}")


def coordinator_name(uri: str) -> str:
    """The actor name of the coordinator of the repository at ``uri``, a normalized address."""
    return f"{COORDINATOR}{stored_digest(uri.encode()).hex()[:16]}"


def coordinator_actor(uri: str) -> ActorHandle:
    """The actor handle of the coordinator of the repository at ``uri``; it is started on the head node if there is none."""
    return (
        ray.remote(CoordinatorActor)
        .options(
            name=coordinator_name(uri),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources={"node:__internal_head__": 0.001},
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=10_000,
        )
        .remote(uri)
    )
