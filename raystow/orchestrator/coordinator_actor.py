"""The coordinator as a Ray actor: detached, on the head node, restarted for ever, one for each repository."""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import Callable, Sequence
from typing import Any

import ray

from .. import __version__
from ..storage.clock import SYSTEM
from ..storage.committer import Committer
from ..storage.digest import stored_digest
from ..storage.errors import RaystowError, SaveFailed
from ..storage.repository import create_repository
from ..storage.root import Entry
from ..storage.version_record import FragmentInfo, PackInfo, VersionRecord
from ..workers.node_actor import NAMESPACE
from ..workers.port import Begin, Ticket
from .cluster import call
from .coordinator import Attempt, Coordinator, Phase

logger = logging.getLogger(__name__)

_TICK = 0.5  # seconds between looks at deadlines and at the nodes alive
_ANSWER = 60.0  # seconds within which a call that does not wait for others must be answered


class CoordinatorActor:
    """Lets calls wait for the state machine, and does its store operations beside the event loop."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._core: Coordinator | None = None
        self._starting = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Make or open the repository and take the next epoch; the repository's id. Only the first call does anything."""
        async with self._starting:
            if self._core is None:
                repository = await asyncio.to_thread(create_repository, self._uri)
                self._committer = await asyncio.to_thread(Committer, repository, f"{platform.node()}-{SYSTEM.token()}")
                writer = {"raystow": __version__, "ray": ray.__version__, "python": platform.python_version()}
                self._core = Coordinator(self._committer, SYSTEM, writer=writer)
                self._keeper = asyncio.create_task(self._keep())
        return self._committer.repository.id

    async def join(self, rank: int, incarnation: str) -> None:
        """See ``Coordinator.join``."""
        await self._apply(lambda core: core.join(rank, incarnation))

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

    async def fragment(self, ticket: Ticket, info: FragmentInfo, packs: Sequence[PackInfo]) -> Entry:
        """Take a node's fragment, and return when the attempt is a version."""
        await self._apply(lambda core: core.fragment(ticket, info, packs))
        attempt = await self._until(ticket, lambda attempt: attempt.phase.over)
        assert attempt.entry is not None
        return attempt.entry

    async def failed(self, ticket: Ticket, reason: str) -> None:
        """See ``Coordinator.failed``."""
        await self._apply(lambda core: core.failed(ticket, reason))

    async def rank_lost(self, rank: int, incarnation: str, reason: str) -> None:
        """See ``Coordinator.rank_lost``."""
        await self._apply(lambda core: core.rank_lost(rank, incarnation, reason))

    async def gone(self, rank: int, incarnation: str, reason: str) -> None:
        """See ``Coordinator.gone``."""
        await self._apply(lambda core: core.gone(rank, incarnation, reason))

    async def _apply(self, change: Callable[[Coordinator], Any]) -> Any:
        await self.start()
        assert self._core is not None
        try:
            return change(self._core)
        finally:
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
                    async with self._changed:
                        self._changed.notify_all()
                core.tick()
                core.nodes_alive({node["NodeID"] for node in await asyncio.to_thread(ray.nodes) if node["Alive"]})
                async with self._changed:
                    self._changed.notify_all()
                for id, token in core.abandoned():
                    await asyncio.to_thread(self._discard, id, token)
            except Exception:
                logger.exception("the coordinator's upkeep failed; it goes on")
            async with self._changed:
                try:
                    await asyncio.wait_for(self._changed.wait_for(lambda: core.next_commit() is not None), _TICK)
                except asyncio.TimeoutError:
                    pass

    def _commit(self, record: VersionRecord) -> Entry | RaystowError:
        try:
            return self._committer.commit(record).entry
        except RaystowError as error:
            return error

    def _discard(self, id: int, attempt: str) -> None:
        try:
            self._committer.discard(id, attempt)
        except RaystowError as error:
            logger.warning("objects of the abandoned attempt %d stay until the next collection: %s", id, error)


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

    def join(self, rank: int, incarnation: str) -> None:
        """See ``Coordinator.join``."""
        self._call("join", _ANSWER, rank, incarnation)

    def rank_lost(self, rank: int, incarnation: str, reason: str) -> None:
        """See ``Coordinator.rank_lost``."""
        self._call("rank_lost", _ANSWER, rank, incarnation, reason)

    def _call(self, method: str, timeout: float, *args: object) -> Any:
        return call(getattr(self._actor, method).remote(*args), timeout, f"coordinator of {self._uri}")


def coordinator_actor(uri: str) -> Any:
    """The handle to the coordinator of the repository at ``uri``, started on the head node if there is none."""
    return (
        ray.remote(CoordinatorActor)
        .options(
            name=f"coordinator-{stored_digest(uri.encode()).hex()[:16]}",
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
