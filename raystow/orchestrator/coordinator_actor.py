"""The coordinator as a Ray actor: detached, on the head node, restarted for ever, one for each repository."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray

from .. import __version__
from ..storage import metrics
from ..storage.clock import SYSTEM
from ..storage.coding.digest import stored_digest
from ..storage.committer import Committer
from ..storage.errors import RaystowError, SaveFailed
from ..storage.format import key_files
from ..storage.format.root import Entry
from ..storage.format.signing import PublicKey
from ..storage.format.version_record import FragmentInfo, PackInfo, VersionRecord
from ..storage.log import about, here
from ..storage.repository import create_repository
from ..storage.retention.policy import Policy
from ..workers import ray_metrics
from ..workers.node_actor import NAMESPACE, holders
from ..workers.port import Begin, Ticket
from .cluster import call
from .coordinator import Attempt, Coordinator, Phase
from .housekeeping import Housekeeping
from .known import Known
from .overview import Overview, failures, under_way
from .restoring import Choice, Rounds, Vote

logger = logging.getLogger(__name__)

COORDINATOR = "coordinator-"
"""What the names of coordinators begin with."""

_TICK = 0.5  # seconds between looks at deadlines and at the nodes alive
_ANSWER = 60.0  # seconds within which a call that does not wait for others must be answered


class CoordinatorActor:
    """Lets calls wait for the state machine, and does its store operations beside the event loop."""

    def __init__(self, uri: str) -> None:
        ray_metrics.export()
        here(node=ray.get_runtime_context().get_node_id())
        self._uri, self._began = uri, SYSTEM.now()
        self._core: Coordinator | None = None
        self._starting = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._told = (0, 0)
        self._restoring = asyncio.Lock()
        self._offers: tuple[int, dict[str, Choice]] = (0, {})
        self._shared: tuple[tuple[bytes, ...], ray.ObjectRef | None] = ((), None)
        self._keeper: asyncio.Task[None] | None = None
        self._chores: asyncio.Task[None] | None = None

    async def start(self) -> tuple[str, tuple[PublicKey, ...]]:
        """Make or open the repository and take the next epoch; the repository's id, and whose signatures it asks for. Only the
        first call does anything."""
        async with self._starting:
            if self._core is None:
                signer = key_files.signer()
                repository = await asyncio.to_thread(create_repository, self._uri, signer=signer)
                self._committer = await asyncio.to_thread(Committer, repository, f"{platform.node()}-{SYSTEM.token()}", signer)
                writer = {"raystow": __version__, "ray": ray.__version__, "python": platform.python_version()}
                self._known = Known(repository)
                await asyncio.to_thread(self._known.versions)  # while the store answers
                self._rounds = Rounds(repository, SYSTEM, self._known, on_fall_back=self._count_damage)
                self._housekeeping = Housekeeping(self._committer)
                self._core = Coordinator(self._committer, SYSTEM, writer=writer)
                self._keeper = asyncio.create_task(self._keep())
        return self._committer.repository.id, self._committer.repository.signed_by

    async def overview(self) -> Overview | None:
        """What it is at; None if it has not begun, and this does not make it begin."""
        core, newest = self._core, self._known.newest if self._core is not None else None
        if core is None:
            return None
        now, age = SYSTEM.monotonic(), None if newest is None else SYSTEM.now() - newest.created
        attempts = under_way(core.attempts, now), failures(core.attempts, now)
        repository, epoch = self._committer.repository.id, self._committer.epoch
        return Overview(self._uri, repository, epoch, newest, age, core.aborted_in_a_row, *attempts)

    async def join(self, rank: int, incarnation: str, world_size: int) -> None:
        """See ``Coordinator.join``."""
        await self._apply(lambda core: core.join(rank, incarnation, world_size))
        async with self._restoring:
            self._rounds.left(rank, incarnation)

    async def begin(self, begin: Begin) -> Ticket:
        """See ``Coordinator.begin``."""
        ticket: Ticket = await self._apply(lambda core: core.begin(begin))
        return ticket

    async def finished(self, ticket: Ticket, rank: int, covered: int) -> None:
        """See ``Coordinator.finished``."""
        await self._apply(lambda core: core.finished(ticket, rank, covered))

    async def wait_complete(self, ticket: Ticket) -> None:
        """Return when every rank has finished."""
        await self._until(ticket, lambda attempt: attempt.phase is not Phase.GATHERING)

    async def staged(self, ticket: Ticket, info: FragmentInfo, packs: Sequence[PackInfo]) -> None:
        """See ``Coordinator.staged``."""
        await self._apply(lambda core: core.staged(ticket, info, packs))

    async def fragment(self, ticket: Ticket, info: FragmentInfo, packs: Sequence[PackInfo]) -> Entry:
        """Take a node's fragment, and return when the attempt is a version."""
        await self._apply(lambda core: core.fragment(ticket, info, packs))
        attempt = await self._until(ticket, lambda attempt: attempt.phase.over)
        assert attempt.entry is not None
        return attempt.entry

    async def failed(self, ticket: Ticket, reason: str) -> None:
        """See ``Coordinator.failed``."""
        await self._apply(lambda core: core.failed(ticket, reason))

    async def save_failed(self, rank: int, incarnation: str, save: int, step: int, reason: str) -> None:
        """See ``Coordinator.save_failed``."""
        await self._apply(lambda core: core.save_failed(rank, incarnation, save, step, reason))

    async def gone(self, rank: int, incarnation: str, reason: str) -> None:
        """See ``Coordinator.gone``."""
        await self._apply(lambda core: core.gone(rank, incarnation, reason))

    async def settle_by_node(self, vote: Vote) -> tuple[Choice | None, ray.ObjectRef | None]:
        """As ``settle``, but the records, if they are known here, come through the object store: once to each node, and not to
        each rank."""
        choice = await self.settle(vote)
        if choice is None or not any(records := choice.records):
            return choice, None
        if records != self._shared[0]:
            self._shared = records, ray.put(records)
        return choice.with_records(itertools.repeat(b"")), self._shared[1]

    async def settle(self, vote: Vote) -> Choice | None:
        """Take a rank's word on the version that all restore; the one to restore, or that all have restored."""
        await self.start()
        assert self._core is not None
        async with self._restoring:
            held = await self._held() if vote.tried is None else None
            round = await asyncio.to_thread(self._rounds.vote, vote, held)
            self._core.restored(self._rounds.restored())
        await self._tell()
        async with self._changed:
            await self._changed.wait_for(lambda: round.answers(vote.tried))
        entry = round.answer(vote.tried)
        if entry is None or entry == vote.tried:
            return None if entry is None else Choice(entry)
        if round.held is not None and entry == round.held.entry:
            return replace(round.held, company=round.company)
        async with self._restoring:
            choice = await self._offer(entry.attempt, lambda: (entry, b""))
            return replace(choice, company=round.company)

    async def _offer(self, attempt: str, describe: Callable[[], tuple[Entry, bytes]]) -> Choice:
        """What could be restored of an attempt, which has this entry, and this record if it is no version yet. Who has what in
        memory is asked once for all ranks, and again when a round of theirs has gone on."""
        if self._offers[0] != self._rounds.changes:
            self._offers = self._rounds.changes, {}
        offers = self._offers[1]
        if attempt not in offers:
            entry, promised = describe()
            near = await holders(self._committer.repository.id)
            known = {entry: promised} if promised else {}
            offers[attempt] = Choice.of(entry, self._known.entries, near, lambda of: known.get(of) or self._committer.record(of))
        return offers[attempt]

    async def _held(self) -> Choice | None:
        """The newest save that is no version, but of which all is in the memory of nodes that are alive."""
        assert self._core is not None
        for record in () if self._committer.signs else self._core.held():
            choice = await self._offer(record.attempt, functools.partial(_promised, record))
            if all(info.node in choice.near for info in record.fragments):
                return choice
        return None

    async def _apply(self, change: Callable[[Coordinator], Any]) -> Any:
        await self.start()
        assert self._core is not None
        try:
            return change(self._core)
        finally:
            await self._tell()

    async def _tell(self) -> None:
        """Wake those who wait, if there is news: to wake thousands of nodes at each of ten thousands of calls takes minutes."""
        assert self._core is not None
        news = self._core.changes, self._rounds.changes
        if news != self._told:
            self._told = news
            async with self._changed:
                self._changed.notify_all()

    async def _until(self, ticket: Ticket, reached: Callable[[Attempt], bool]) -> Attempt:
        await self.start()
        assert self._core is not None
        attempt = self._core.attempt(ticket)
        async with self._changed:
            await self._changed.wait_for(lambda: reached(attempt))
        if attempt.phase is Phase.ABORTED:
            raise SaveFailed(attempt.reason, subject=f"save of step {attempt.step}")
        return attempt

    async def _keep(self) -> None:
        """Commit what is complete as soon as it is; look at deadlines and nodes now and then."""
        assert self._core is not None
        core = self._core
        while True:
            try:
                while (attempt := core.next_commit()) is not None:
                    core.settled(attempt, await asyncio.to_thread(self._commit, core.record(attempt)))
                    await self._tell()
                    if attempt.entry is not None:
                        self._known.committed(attempt.entry)
                    if attempt.phase is Phase.COMMITTED and attempt.retention is not None:
                        self._keep_house(attempt.retention)
                core.tick()
                async with self._restoring:
                    await asyncio.to_thread(self._rounds.tick)
                core.nodes_alive({node["NodeID"] for node in await asyncio.to_thread(ray.nodes) if node["Alive"]})
                await self._tell()
                for id, token in core.abandoned():
                    await asyncio.to_thread(self._discard, id, token)
                self._measure(core)
            except Exception:
                logger.exception("the coordinator's upkeep failed; it goes on")
            async with self._changed:
                try:
                    await asyncio.wait_for(self._changed.wait_for(lambda: core.next_commit() is not None), _TICK)
                except asyncio.TimeoutError:
                    pass

    def _keep_house(self, policy: Policy) -> None:
        """Beside the commits; what comes while it is at work waits for the next commit."""
        if self._chores is None or self._chores.done():
            bases = self._core.bases if self._core is not None else ()
            self._chores = asyncio.create_task(asyncio.to_thread(self._housekeeping.run, policy, bases))

    def _count_damage(self) -> None:
        metrics.record(metrics.DAMAGED, repository=self._uri)

    def _measure(self, core: Coordinator) -> None:
        """Gauges, which Ray forgets some seconds after they were told."""
        newest = self._known.newest
        if newest is not None and newest.raw:
            metrics.record(metrics.RATIO, newest.stored / newest.raw, repository=self._uri)
        metrics.record(metrics.NEWEST, self._began if newest is None else newest.created, repository=self._uri)
        metrics.record(metrics.OPEN, sum(not attempt.phase.over for attempt in core.attempts), repository=self._uri)
        metrics.record(metrics.ABORTED_IN_A_ROW, core.aborted_in_a_row, repository=self._uri)

    def _commit(self, version: VersionRecord) -> Entry | RaystowError:
        begun = SYSTEM.monotonic()
        try:
            return self._committer.commit(version).entry
        except RaystowError as error:
            return error
        finally:
            metrics.record(metrics.COMMIT, SYSTEM.monotonic() - begun, repository=self._uri)

    def _discard(self, id: int, attempt: str) -> None:
        try:
            self._committer.discard(id, attempt)
        except RaystowError as error:
            log = about(logger, repository=self._uri, version=id, attempt=attempt)
            log.warning("objects of the abandoned attempt %d stay until the next collection: %s", id, error)


def _promised(record: VersionRecord) -> tuple[Entry, bytes]:
    data = record.dump()
    return record.entry(stored_digest(data), len(data)), data


class RayPort:
    """The coordinator of one repository, as node workers call it."""

    def __init__(self, uri: str) -> None:
        self._uri, self._actor = uri, coordinator_actor(uri)

    def begin(self, begin: Begin) -> Ticket:
        """See ``Port.begin``."""
        ticket: Ticket = self._call("begin", _ANSWER, begin)
        return ticket

    def finished(self, ticket: Ticket, rank: int, covered: int) -> None:
        """See ``Port.finished``."""
        self._call("finished", _ANSWER, ticket, rank, covered)

    def wait_complete(self, ticket: Ticket) -> None:
        """See ``Port.wait_complete``."""
        self._call("wait_complete", ticket.timeout + _ANSWER, ticket)

    def staged(self, ticket: Ticket, info: FragmentInfo, packs: Sequence[PackInfo]) -> None:
        """See ``Port.staged``."""
        self._call("staged", _ANSWER, ticket, info, packs)

    def fragment(self, ticket: Ticket, info: FragmentInfo, packs: Sequence[PackInfo]) -> Entry:
        """See ``Port.fragment``."""
        entry: Entry = self._call("fragment", ticket.timeout + 2 * _ANSWER, ticket, info, packs)
        return entry

    def failed(self, ticket: Ticket, reason: str) -> None:
        """See ``Port.failed``."""
        self._call("failed", _ANSWER, ticket, reason)

    def gone(self, rank: int, incarnation: str, reason: str) -> None:
        """See ``Port.gone``."""
        self._call("gone", _ANSWER, rank, incarnation, reason)

    def join(self, rank: int, incarnation: str, world_size: int) -> None:
        """See ``Coordinator.join``."""
        self._call("join", _ANSWER, rank, incarnation, world_size)

    def settle(self, vote: Vote) -> Choice | None:
        """See ``restoring``. Waits for the other ranks."""
        choice: Choice | None
        choice, records = self._call("settle_by_node", vote.timeout + 2 * _ANSWER, vote)
        if choice is None or records is None:
            return choice
        return choice.with_records(call(records, _ANSWER, f"coordinator of {self._uri}"))

    def save_failed(self, rank: int, incarnation: str, save: int, step: int, reason: str) -> None:
        """See ``Coordinator.save_failed``."""
        self._call("save_failed", _ANSWER, rank, incarnation, save, step, reason)

    def _call(self, method: str, timeout: float, *args: object) -> Any:
        return call(getattr(self._actor, method).remote(*args), timeout, f"coordinator of {self._uri}")


def coordinator_name(uri: str) -> str:
    """The name of the coordinator of the repository at ``uri``, as the store writes that."""
    return f"{COORDINATOR}{stored_digest(uri.encode()).hex()[:16]}"


def coordinator_actor(uri: str) -> Any:
    """The handle to the coordinator of the repository at ``uri``, started on the head node if there is none."""
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
