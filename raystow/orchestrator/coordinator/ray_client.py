"""Finds or starts the coordinator actor of a repository, and calls it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from msgspec.structs import replace

from ...storage.coding.digest import stored_digest
from ...storage.errors import SettingsMissing
from ...storage.format.root import Entry
from ...storage.format.version_record import FragmentInfo
from ...storage.log import about
from ...storage.stores.settings import LOCAL, StoreSettings
from ...workers import actor_environment
from ...workers.node.actor import NAMESPACE
from ...workers.protocol import messages
from ...workers.protocol.messages import (
    PROTOCOL,
    Begin,
    CoordinatorStarted,
    EntryInfo,
    Incarnation,
    JoinRun,
    JournalChoice,
    JournalVote,
    RankReading,
    RestoreChoice,
    RestoreVote,
    SegmentStored,
    SegmentTicket,
    StartRun,
    Ticket,
    UnusedByAll,
    UnusedNames,
)
from ...workers.ray_connection import RayConnection
from .actor import UNUSED, CoordinatorActor

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from ray.actor import ActorHandle

COORDINATOR = "coordinator-"
"""The prefix of the actor names of coordinators."""

_ANSWER = 60.0  # seconds within which a call that does not wait for others must be answered
_STARTS = 3  # of the coordinator in a row, each of which needs the settings of the store again


_Answer = TypeVar("_Answer", bound=messages.Message)
_Asked = TypeVar("_Asked", RestoreVote, UnusedNames)


class RayCoordinatorClient:
    """The coordinator of one repository, as ranks and node workers call it: a ``CoordinatorClient``.

    Args:
        uri: The address of the repository.
        settings: Returns those of its store, which the coordinator opens it with.
    """

    def __init__(self, uri: str, settings: Callable[[], StoreSettings] = lambda: LOCAL) -> None:
        self._uri, self._settings, self._ray = uri, settings, RayConnection.here()
        self._actor: ActorHandle | None = None

    def open_store(self, settings: StoreSettings, timeout: float = _ANSWER) -> None:
        """Send settings of the store, if it needs any."""
        if settings != LOCAL:
            self._tell(messages.OpenStore(self._uri, settings), timeout)

    def start(self, run: StartRun, timeout: float) -> CoordinatorStarted:
        """See ``CoordinatorActor.start``. ``timeout``: seconds."""
        self.open_store(self._settings(), timeout)
        return self._ask(run, CoordinatorStarted, timeout)

    def begin(self, begin: Begin) -> Ticket:
        return self._ask(begin, Ticket)

    def finished(self, ticket: Ticket, rank: int, covered: int) -> None:
        self._tell(messages.RankFinished(ticket, rank, covered))

    def wait_complete(self, ticket: Ticket, warn: Callable[[str], None]) -> None:
        self._wait(lambda last: messages.AwaitRanks(ticket, last), messages.Acknowledged, ticket.timeout + _ANSWER, warn)

    def staged(self, ticket: Ticket, info: FragmentInfo) -> None:
        self._tell(messages.PartStaged(ticket, info))

    def fragment(self, ticket: Ticket, info: FragmentInfo, warn: Callable[[str], None]) -> Entry:
        timeout, part = ticket.timeout + 2 * _ANSWER, messages.PartStored(ticket, info)
        return self._wait(lambda last_warning: replace(part, last_warning=last_warning), messages.Committed, timeout, warn).entry

    def failed(self, ticket: Ticket, reason: str) -> None:
        self._tell(messages.PartFailed(ticket, messages.shortened(reason)))

    def rank_disconnected(self, rank: int, incarnation: Incarnation, reason: str) -> None:
        self._tell(messages.RankDisconnected(rank, incarnation, reason))

    def open_segment(self, newest: EntryInfo) -> SegmentTicket:
        return self._ask(messages.OpenSegment(newest), SegmentTicket)

    def segment_stored(self, part: SegmentStored) -> None:
        self._tell(part)

    def join(self, member: JoinRun) -> None:
        self._tell(member)

    def settle(self, vote: RestoreVote) -> RestoreChoice | None:
        """See ``restore.rounds``. Waits for the other ranks."""
        vote = replace(vote, damage=messages.shortened(vote.damage), error=messages.shortened(vote.error))
        answer: messages.Message = messages.RanksReading()
        while isinstance(answer, messages.RanksReading):
            data, shared = self._call("handle_vote", vote, vote.timeout + 2 * _ANSWER)
            data = data if shared is None else self._fetched(shared)
            answer = messages.decode(data, RestoreChoice, messages.NoVersion, messages.RanksReading)
            vote = self._noted(answer, vote)
        return answer if isinstance(answer, RestoreChoice) else None

    def _fetched(self, shared: ray.ObjectRef) -> bytes:
        data: bytes = self._ray.call(lambda: shared, _ANSWER, self._who)
        return data

    def compare(self, report: UnusedNames) -> bytes:
        """See ``restore.rounds``. Waits for the other ranks, if this one leaves names unused."""
        if not report.unused:
            self._send(report)
            return b""
        answer: messages.Message = messages.RanksReading()
        while not isinstance(answer, UnusedByAll):
            data = self._call("handle", report, report.timeout + 2 * _ANSWER)
            answer = messages.decode(data, UnusedByAll, messages.RanksReading)
            report = self._noted(answer, report)
        return answer.unused

    def _noted(self, answer: messages.Message, asked: _Asked) -> _Asked:
        """Log the warning of an answer, if it has one. Returns what to ask next."""
        if not isinstance(answer, messages.RanksReading) or not answer.warning:
            return asked
        about(logger, repository=self._uri, rank=asked.rank).warning("restore: %s", answer.warning)
        return replace(asked, last_warning=answer.number)

    def reading(self, rank: RankReading) -> None:
        """Tell that a rank reads on, without waiting for an answer, since that would delay its reads."""
        self._send(rank)

    def save_failed(self, rank: int, incarnation: Incarnation, save: int, step: int, reason: str) -> bool:
        report = messages.RankSaveFailed(rank, incarnation, save, step, messages.shortened(reason))
        return self._ask(report, messages.FailureNoted).first

    def settle_journal(self, vote: JournalVote) -> JournalChoice:
        """See ``journal.rounds``. Waits for the other ranks."""
        answer: messages.Message = messages.RanksReading()
        while not isinstance(answer, JournalChoice):
            data = self._call("handle_journal", vote, vote.timeout + 2 * _ANSWER)
            answer = messages.decode(data, JournalChoice, messages.RanksReading)
        return answer

    def next_save(self, ask: messages.AskNextSave) -> messages.NextSave:
        """See ``save_schedule``."""
        return self._ask(ask, messages.NextSave)

    def outcome(self, id: int, attempt: str, timeout: float = _ANSWER) -> Entry:
        """The entry of the version that an attempt has become, once it is over. Raises ``SaveFailed`` if it has become none."""
        return self._ask(messages.FindOutcome(id, attempt), messages.Committed, timeout).entry

    def _wait(
        self, ask: Callable[[int], messages.Message], expected: type[_Answer], timeout: float, warn: Callable[[str], None]
    ) -> _Answer:
        """Ask until there is an answer and not a warning. ``ask``: makes the question from the number of warnings so far."""
        last_warning = 0
        while True:
            answer = messages.decode(self._call("handle", ask(last_warning), timeout), expected, messages.RanksWarning)
            if isinstance(answer, expected):
                return answer
            assert isinstance(answer, messages.RanksWarning)
            last_warning = answer.number
            warn(answer.text)

    def _send(self, report: messages.Message) -> None:
        """Send without waiting for an answer."""
        self._ray.send(lambda: self._known().handle.remote(PROTOCOL, messages.encode(report)), self._who)

    def _tell(self, report: messages.Message, timeout: float = _ANSWER) -> None:
        self._ask(report, messages.Acknowledged, timeout)

    def _ask(self, request: messages.Message, expected: type[_Answer], timeout: float = _ANSWER) -> _Answer:
        return messages.decode(self._call("handle", request, timeout), expected)

    def _call(self, method: str, request: messages.Message, timeout: float) -> Any:
        data = messages.encode(request)

        def answer() -> object:
            actor = self._known()
            return self._ray.call(lambda: getattr(actor, method).remote(PROTOCOL, data), timeout, self._who)

        def forget() -> None:
            self._actor = None

        for _ in range(_STARTS):
            try:
                return self._ray.find(answer, forget)
            except SettingsMissing:  # it was started, or started again, by now
                self.open_store(self._settings())
        return self._ray.find(answer, forget)

    def _known(self) -> ActorHandle:
        """The coordinator, which is started if there is none."""
        if (actor := self._actor) is None:
            actor = self._actor = self._ray.ask(self._start_actor, _ANSWER)
        return actor

    def _start_actor(self) -> ActorHandle:
        return coordinator_actor(self._uri, self._settings().place)

    @property
    def _who(self) -> str:
        return f"coordinator of {self._uri}"


def coordinator_name(uri: str, place: str = "") -> str:
    """The actor name of the coordinator of the repository at ``uri``, a normalized address. ``place``: see ``StoreSettings``."""
    name = f"{COORDINATOR}{stored_digest(uri.encode()).hex()[:16]}"
    return f"{name}-{place}" if place else name


def coordinator_actor(uri: str, place: str = "", *, unused: float = UNUSED) -> ActorHandle:
    """The actor handle of the coordinator of the repository at ``uri``; it is started on the head node if there is none.
    ``place``, ``unused``: see ``CoordinatorActor``."""
    return (
        ray.remote(CoordinatorActor)
        .options(
            name=coordinator_name(uri, place),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources={"node:__internal_head__": 0.001},
            max_restarts=-1,
            max_task_retries=-1,
            runtime_env=actor_environment.for_actor(),
            max_concurrency=1_000_000,  # a call of each rank waits until the last one votes
        )
        .remote(uri, unused, place)
    )
