"""The coordinator as a Ray actor: one for each repository, detached, on the head node, restarted without limit."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import ray
from msgspec.structs import replace

from ... import __version__
from ...storage import background, metrics
from ...storage.clock import SYSTEM
from ...storage.coding.digest import stored_digest
from ...storage.committer import UNKNOWN, Committer, outcome_in
from ...storage.errors import Fenced, OutcomeUnknown, RaystowError
from ...storage.format import key_files
from ...storage.format.root import Entry
from ...storage.format.version_record import FragmentInfo, PackInfo, VersionRecord
from ...storage.log import about, here
from ...storage.repository import create_repository
from ...storage.retention.policy import Policy
from ...workers import ray_metrics
from ...workers.node.actor import holders, journal_entries, ranks_connected
from ...workers.protocol import messages
from ...workers.protocol.messages import (
    Begin,
    CoordinatorStarted,
    CoordinatorStatus,
    EntryInfo,
    JournalVote,
    NoVersion,
    RankReading,
    RanksReading,
    RestoreChoice,
    RestoreVote,
    StartRun,
    StoredEntry,
    Ticket,
)
from .. import ray_cluster
from ..journal.rounds import JournalRounds
from ..restore.rounds import RestoreRounds
from ..restore.version_cache import VersionCache
from .attempt import Attempt, Phase
from .attempts import ANOTHER_RUN, Coordinator
from .housekeeping import Housekeeping
from .save_costs import newest_records
from .segments import Segments, stored_entries
from .status import failed_attempts, open_attempts

logger = logging.getLogger(__name__)

UNUSED = 3600.0
"""Seconds without any call after which a coordinator ends, unless ranks are connected to node workers."""

_TICK = 0.5  # seconds between checks of deadlines and nodes

_Result = TypeVar("_Result")


class CoordinatorActor:
    """Lets calls wait for the state machine, and runs its store operations in threads.

    Ends itself when it has been ``unused`` for so many seconds, unless it alone knows of a save in memory that can be restored.
    A process that calls it later starts another one, which finds all else in the repository and with the node workers.
    """

    def __init__(self, uri: str, unused: float = UNUSED) -> None:
        ray_metrics.export()
        here(node=ray.get_runtime_context().get_node_id())
        self._uri, self._began = uri, SYSTEM.now()
        self._core: Coordinator | None = None
        self._starting = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._reported = (0, 0, 0)
        self._restoring, self._recalling = asyncio.Lock(), asyncio.Lock()
        self._replays = JournalRounds(SYSTEM, lambda: self._committer.rollbacks)
        self._in_store: dict[EntryInfo, StoredEntry] = {}  # the entries that the store has, when all ranks voted last
        self._choices: tuple[int, dict[str, RestoreChoice]] = (0, {})  # by attempt, since this change of the rounds
        self._shared: tuple[tuple[bytes, ...], ray.ObjectRef | None] = ((), None)
        self._keeper: asyncio.Task[None] | None = None
        self._census: tuple[asyncio.Task[list[dict[str, Any]]], set[str]] | None = None  # Ray's nodes, and those known before
        self._chores: asyncio.Task[None] | None = None
        self._sweep: asyncio.Task[None] | None = None  # deletes the objects of abandoned attempts
        self._chore_errors = background.ErrorLog("housekeeping")
        self._fenced: tuple[Fenced, str] | None = None  # by another run, with the job that was fenced
        self._job = ""
        self._starts = itertools.count(1)
        self._unused, self._used = unused, SYSTEM.monotonic()

    async def start(self, run: StartRun | None = None) -> CoordinatorStarted:
        """Make or open the repository and take the next epoch. Only the first call does anything, and that of a ``run`` that
        begins after another run took over: a training that is started later is the one that is meant."""
        async with self._starting:
            if self._keeper is None:
                self._keeper = asyncio.create_task(self._keep())
            if run is not None:
                if self._fenced is not None:
                    error, job = self._fenced
                    if job == run.job and run.on_fenced == "raise":  # the same training, restarted: both would alternate
                        raise error
                    await self._take_over()
                self._job = run.job
            if self._core is None:
                signer = key_files.signer()
                repository = await asyncio.to_thread(create_repository, self._uri, signer=signer)
                self._committer = await asyncio.to_thread(Committer, repository, self._owner(), signer)
                writer = {"raystow": __version__, "ray": ray.__version__, "python": platform.python_version()}
                self._known = VersionCache(repository, on_read=self._committer.notice)
                await asyncio.to_thread(self._known.root)  # cached while the store answers
                count_damage = functools.partial(metrics.record, metrics.DAMAGED, repository=self._uri)
                self._rounds = RestoreRounds(
                    repository, SYSTEM, self._known, is_current=self._committer.is_current, on_fall_back=count_damage
                )
                self._housekeeping = Housekeeping(self._committer)
                self._segments = Segments(self._committer, SYSTEM)
                self._core = Coordinator(self._committer, SYSTEM, writer=writer)
        turn = f"{self._committer.epoch:012d}.{next(self._starts):09d}"  # an epoch is above all earlier ones
        return CoordinatorStarted(self._committer.catalog.id, self._committer.catalog.trust.keys, turn)

    async def overview(self) -> CoordinatorStatus | None:
        """The status; None before ``start``."""
        if (core := self._core) is None:
            return None
        now, newest = SYSTEM.monotonic(), self._known.newest
        age = None if newest is None else SYSTEM.now() - newest.created
        attempts = open_attempts(core.attempts, now), failed_attempts(core.attempts, now)
        repository, epoch = self._committer.catalog.id, self._committer.epoch
        return CoordinatorStatus(self._uri, repository, epoch, newest, age, core.aborted_in_a_row, *attempts)

    async def join(self, rank: int, incarnation: str, world_size: int) -> None:
        await self._apply(lambda core: core.join(rank, incarnation, world_size))
        async with self._restoring:
            self._rounds.left(rank, incarnation)
            self._replays.left(rank, incarnation)
        await self._tell()

    async def begin(self, begin: Begin) -> Ticket:
        if self._fenced is not None and begin.on_fenced == "raise":
            raise self._fenced[0]
        return await self._apply(lambda core: core.begin(begin))

    async def fragment(self, ticket: Ticket, info: FragmentInfo, packs: Sequence[PackInfo]) -> Entry:
        """Take a node's fragment, and return when the attempt is a version."""
        core = await self._started()
        if core.find(ticket.attempt) is None:  # an earlier coordinator may have committed it
            return await self.outcome(ticket.id, ticket.attempt)
        await self._apply(lambda core: core.fragment(ticket, info, packs))
        return (await self._until(ticket, lambda attempt: attempt.phase.over)).result()

    async def outcome(self, id: int, name: str) -> Entry:
        """Return the entry of the version that an attempt has become, once it is over. Raises what ``outcome_in`` raises."""
        attempt = (await self._started()).find(name)
        if attempt is not None:
            async with self._changed:
                await self._changed.wait_for(lambda: attempt.phase.over)
            if not isinstance(attempt.failure, OutcomeUnknown):
                return attempt.result()
            return outcome_in(await asyncio.to_thread(self._committer.catalog.root), id, name)
        # This coordinator's epoch has replaced the one that the attempt belongs to: no write of that is under way any more.
        return outcome_in(await asyncio.to_thread(self._committer.catalog.root), id, name, over=True)

    async def next_save(self, ask: messages.AskNextSave) -> messages.NextSave:
        """See ``save_schedule``. The records of earlier versions are read before the first answer that needs them."""
        core = await self._started()
        if ask.seconds is None:
            async with self._recalling:
                if not core.costs.recalled:
                    core.costs.recall(await asyncio.to_thread(newest_records, self._committer.catalog))
        return await self._apply(lambda core: core.next_save(ask))

    async def handle(self, protocol: str, data: bytes) -> bytes:
        """Answer a request of a rank or node worker: one of ``COORDINATOR_REQUESTS``, encoded."""
        self._check(protocol)
        return messages.encode(await self.answer(messages.decode(data, *messages.COORDINATOR_REQUESTS)))

    def _check(self, protocol: str) -> None:
        self._used = SYSTEM.monotonic()
        messages.check_protocol(protocol, f"the caller of the coordinator of {self._uri}")

    async def answer(self, request: messages.Message) -> messages.Message:
        """Answer one of ``COORDINATOR_REQUESTS``."""
        match request:
            case StartRun():
                return await self.start(request)
            case Begin():
                return await self.begin(request)
            case messages.PartStored(ticket, info, packs):
                return messages.Committed(await self.fragment(ticket, info, packs))
            case messages.JoinRun(rank, incarnation, world_size):
                await self.join(rank, incarnation, world_size)
            case messages.RankFinished(ticket, rank, covered):
                await self._apply(lambda core: core.finished(ticket, rank, covered))
            case messages.AwaitRanks(ticket):
                await self._until(ticket, lambda attempt: attempt.phase is not Phase.GATHERING)
            case messages.PartStaged(ticket, info, packs):
                await self._apply(lambda core: core.staged(ticket, info, packs))
            case messages.PartFailed(ticket, reason):
                await self._apply(lambda core: core.failed(ticket, reason))
            case messages.RankSaveFailed(rank, incarnation, save, step, reason):
                first = await self._apply(lambda core: core.save_failed(rank, incarnation, save, step, reason))
                return messages.FailureNoted(first)
            case messages.AskNextSave():
                return await self.next_save(request)
            case messages.FindOutcome(id, attempt):
                return messages.Committed(await self.outcome(id, attempt))
            case messages.OpenSegment(newest):
                await self.start()
                return self._segments.open(newest)
            case messages.SegmentStored():
                await self.start()
                self._segments.stored(request)
                async with self._changed:
                    self._changed.notify_all()
            case messages.RankDisconnected(rank, incarnation, reason):
                await self._apply(lambda core: core.rank_disconnected(rank, incarnation, reason))
            case RankReading():
                await self.start()
                async with self._restoring:
                    self._rounds.reading(request)
                    self._replays.reading(request)
        return messages.Acknowledged()

    async def handle_vote(self, protocol: str, data: bytes) -> tuple[bytes, ray.ObjectRef | None]:
        """As ``settle``, encoded. Records that are known here come through the object store: once to each node, and not to each
        rank."""
        self._check(protocol)
        choice = await self.settle(messages.decode(data, RestoreVote))
        if not isinstance(choice, RestoreChoice) or not any(records := choice.records):
            return messages.encode(choice), None
        if records != self._shared[0]:
            self._shared = records, ray.put(records)
        return messages.encode(choice.with_records(itertools.repeat(b""))), self._shared[1]

    async def settle(self, vote: RestoreVote) -> RestoreChoice | RanksReading | NoVersion:
        """Take a rank's vote on the version to restore. Returns the version to restore, or the one that all have restored."""
        core = await self._started()
        core.check_member(vote)
        async with self._restoring:
            in_memory = await self._newest_in_memory(core) if vote.tried is None else None
            round = await asyncio.to_thread(self._rounds.vote, vote, in_memory)
            core.restored(self._rounds.restored())
        await self._tell()
        if not await self._within(vote.timeout, lambda: round.answers(vote.tried)):
            return RanksReading()
        entry = round.answer(vote.tried)
        if entry is None:
            return NoVersion()
        if entry == vote.tried:
            return RestoreChoice(entry)
        if round.held is not None and entry == round.held.entry:
            return replace(round.held, group=round.group)
        async with self._restoring:
            choice = await self._choice(entry.attempt, lambda: (entry, b""))
            return replace(choice, group=round.group)

    async def handle_journal(self, protocol: str, data: bytes) -> bytes:
        """Take a rank's vote on the step to replay to, and answer when all ranks have voted, or with ``RanksReading``."""
        self._check(protocol)
        vote = messages.decode(data, JournalVote)
        (await self._started()).check_member(vote)
        async with self._restoring:
            held = await self._journal_entries() if self._replays.chooses(vote) else {}
            round = self._replays.vote(vote, lambda: held)
        await self._tell()
        if not await self._within(vote.timeout, lambda: round.answers(vote)):
            return messages.encode(RanksReading())
        choice = round.answer(vote)
        entries = tuple(replace(place, stored=self._in_store.get(place.info)) for place in choice.entries)
        return messages.encode(replace(choice, entries=entries))

    async def _journal_entries(self) -> Mapping[str, Sequence[EntryInfo]]:
        """The entries that nodes and the store have."""
        catalog = self._committer.catalog
        held = await journal_entries(catalog.id)
        try:
            root = await asyncio.to_thread(catalog.root)
            self._in_store = await asyncio.to_thread(stored_entries, catalog, root)
        except RaystowError as error:
            about(logger, repository=self._uri).warning("the store is not searched for recorded steps: %s", error)
            self._in_store = {}
        return {**held, messages.STORE: tuple(self._in_store)}

    async def _choice(self, attempt: str, describe: Callable[[], tuple[Entry, bytes]]) -> RestoreChoice:
        """The restore choice of an attempt. ``describe``: its entry, and its record if it is not a version yet. The contents of
        node memories are requested once for all ranks, and again after a change of any round."""
        if self._choices[0] != self._rounds.changes:
            self._choices = self._rounds.changes, {}
        choices = self._choices[1]
        if attempt not in choices:
            entry, promised = describe()
            near = await holders(self._committer.catalog.id)
            known = {entry: promised} if promised else {}
            choices[attempt] = RestoreChoice.of(
                entry, self._known.entries, near, lambda of: known.get(of) or self._committer.record(of)
            )
        return choices[attempt]

    async def _newest_in_memory(self, core: Coordinator) -> RestoreChoice | None:
        """The newest save that is not a version but is complete in the memory of live nodes."""
        for record in () if self._committer.signs else core.held():
            choice = await self._choice(record.attempt, functools.partial(_promised, record))
            if all(info.node in choice.near for info in record.fragments):
                return choice
        return None

    async def _started(self) -> Coordinator:
        await self.start()
        assert self._core is not None
        return self._core

    async def _apply(self, change: Callable[[Coordinator], _Result]) -> _Result:
        core = await self._started()
        try:
            return change(core)
        finally:
            await self._tell()

    async def _tell(self) -> None:
        """Wake the waiting calls if anything has changed: waking thousands of them at each of ten thousands of calls takes
        minutes."""
        assert self._core is not None
        news = self._core.changes, self._rounds.changes, self._replays.changes
        if news != self._reported:
            self._reported = news
            async with self._changed:
                self._changed.notify_all()

    async def _within(self, seconds: float, reached: Callable[[], bool]) -> bool:
        """Wait until a change leads to ``reached``; return False if none does within so many seconds."""
        try:
            async with self._changed:
                return await asyncio.wait_for(self._changed.wait_for(reached), seconds)
        except asyncio.TimeoutError:
            return False

    async def _until(self, ticket: Ticket, reached: Callable[[Attempt], bool]) -> Attempt:
        attempt = (await self._started()).attempt(ticket)
        async with self._changed:
            await self._changed.wait_for(lambda: reached(attempt))
        if attempt.phase is Phase.ABORTED:
            attempt.result()
        return attempt

    async def _keep(self) -> None:
        """Look after the saves and this actor: at once for a commit, else periodically."""
        errors = background.ErrorLog("coordinator")
        while True:
            try:
                if self._core is not None:
                    await self._look_after(self._core)
                await self._end_if_unused()
            except Exception as error:
                errors.note(error)
            await self._within(_TICK, self._has_commit)

    async def _look_after(self, core: Coordinator) -> None:
        """Commit complete attempts; check deadlines and nodes."""
        while (attempt := core.next_commit()) is not None:
            outcome = await asyncio.to_thread(self._commit, core.record(attempt))
            core.settled(attempt, outcome)
            if isinstance(outcome, Fenced):
                self._fenced = Fenced(outcome.what, subject=self._uri, remedy=ANOTHER_RUN), self._job
                if attempt.takes_over:
                    await self._take_over()
            await self._tell()
            self._known.committed(self._committer.root)
            if attempt.phase is Phase.COMMITTED and attempt.retention is not None:
                self._apply_retention(attempt.retention, core.bases)
        if (opened := self._segments.next_commit()) is not None:
            try:
                await asyncio.to_thread(self._segments.commit, opened)
            finally:
                self._segments.settled(opened)
        core.tick()
        async with self._restoring:
            await asyncio.to_thread(self._rounds.tick)
            self._replays.tick()
        await self._look_for_nodes(core)
        await self._tell()
        if (self._sweep is None or self._sweep.done()) and (abandoned := core.abandoned()):
            self._sweep = asyncio.create_task(asyncio.to_thread(self._discard, abandoned))  # which no commit waits for
        self._measure(core)

    async def _look_for_nodes(self, core: Coordinator) -> None:
        """Ask Ray which nodes are alive, and note its answer once it is there: a frozen head node does not answer, and neither
        commits nor deadlines wait for it, but for half a second once. A node that saves since Ray was asked is alive."""
        seconds = 0.0
        if self._census is None:
            self._census, seconds = (asyncio.create_task(asyncio.to_thread(ray.nodes)), core.nodes), _TICK
        answer, asked = self._census
        await asyncio.wait([answer], timeout=seconds)
        if answer.done():
            self._census = None
            core.nodes_alive({node["NodeID"] for node in answer.result() if node["Alive"]} | (core.nodes - asked))

    async def _end_if_unused(self) -> None:
        """End for good if this coordinator has not been used for long, and has nothing that another one would not find."""
        if self._is_in_use():
            self._used = SYSTEM.monotonic()
        used = self._used
        if SYSTEM.monotonic() < used + self._unused:
            return
        if await ranks_connected(self._uri):  # they may save after this pause
            self._used = SYSTEM.monotonic()
        elif self._used == used:
            about(logger, repository=self._uri).info("the coordinator ends: unused for %.0f s", self._unused)
            ray.kill(ray.get_runtime_context().current_actor)

    def _is_in_use(self) -> bool:
        if self._core is None:
            return False
        chores = self._chores is not None and not self._chores.done()
        return chores or any(part.in_use for part in (self._core, self._rounds, self._replays, self._segments))

    def _has_commit(self) -> bool:
        core = self._core
        return core is not None and (core.next_commit() is not None or self._segments.next_commit() is not None)

    async def _take_over(self) -> None:
        """Take the next epoch again, although another run has taken one meanwhile."""
        await asyncio.to_thread(self._committer.take_over, self._owner())
        about(logger, repository=self._uri).warning("this run has taken over the repository, epoch %d", self._committer.epoch)
        self._fenced = None

    def _owner(self) -> str:
        """A name that no other coordinator has, for messages about two runs with one repository."""
        return f"{ray_cluster.run_here('coordinator')} ({SYSTEM.token()})"

    def _apply_retention(self, policy: Policy, bases: Collection[int]) -> None:
        """Run retention in a thread. A policy that comes during a run waits for the next commit."""
        if self._chores is None or self._chores.done():
            self._chores = asyncio.create_task(asyncio.to_thread(self._keep_house, policy, bases))

    def _keep_house(self, policy: Policy, bases: Collection[int]) -> None:
        try:
            self._housekeeping.run(policy, bases)
        except Exception as error:
            self._chore_errors.note(error)

    def _measure(self, core: Coordinator) -> None:
        """Set the gauges again: Ray drops them after some seconds."""
        newest = self._known.newest
        if newest is not None and newest.raw:
            metrics.record(metrics.RATIO, newest.stored / newest.raw, repository=self._uri)
        metrics.record(metrics.NEWEST, self._began if newest is None else newest.created, repository=self._uri)
        root = self._committer.root
        if durable := [*(entry.step for entry in root.versions[-1:]), *(segment.step for segment in root.segments)]:
            metrics.record(metrics.DURABLE_STEP, max(durable), repository=self._uri)
        metrics.record(metrics.OPEN, sum(not attempt.phase.over for attempt in core.attempts), repository=self._uri)
        metrics.record(metrics.ABORTED_IN_A_ROW, core.aborted_in_a_row, repository=self._uri)

    def _commit(self, version: VersionRecord) -> Entry | RaystowError:
        begun = SYSTEM.monotonic()
        try:
            return self._committer.commit(version).entry
        except RaystowError as error:
            return error
        except Exception as error:  # an attempt that is not over would be committed again and again
            about(logger, repository=self._uri, version=version.id, attempt=version.attempt).exception("the commit failed")
            return OutcomeUnknown(f"the commit failed: {error!r}", subject=f"version {version.id}", remedy=UNKNOWN)
        finally:
            metrics.record(metrics.COMMIT, SYSTEM.monotonic() - begun, repository=self._uri)

    def _discard(self, attempts: Sequence[tuple[int, str]]) -> None:
        for id, attempt in attempts:
            try:
                self._committer.discard(id, attempt)
            except RaystowError as error:
                log = about(logger, repository=self._uri, version=id, attempt=attempt)
                log.warning("objects of the abandoned attempt %d stay until the next collection: %s", id, error)
            except Exception as error:
                self._chore_errors.note(error)


def _promised(record: VersionRecord) -> tuple[Entry, bytes]:
    data = record.dump()
    return record.entry(stored_digest(data), len(data)), data
