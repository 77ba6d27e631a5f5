"""The coordinator as a Ray actor: one for each repository, detached, on the head node, restarted without limit."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import ray
from msgspec.structs import replace

from ...storage.coding.digest import stored_digest
from ...storage.commit.catalog import Catalog
from ...storage.commit.committer import outcome_in
from ...storage.errors import DeadlineExceeded, Fenced, OutcomeUnknown, RaystowError
from ...storage.format.root import Entry
from ...storage.format.version_record import VersionRecord
from ...storage.log import about
from ...storage.retention.policy import Best, Policy
from ...storage.runtime import background, gc_pause
from ...storage.runtime.clock import SYSTEM
from ...storage.stores.settings import JobSettings, StoreAddress
from ...workers import actor_environment
from ...workers.node.actor import ask_for_settings, holders, journal_entries, ranks_connected
from ...workers.protocol import messages
from ...workers.protocol.messages import (
    Acknowledged,
    Begin,
    CoordinatorRequest,
    CoordinatorStarted,
    CoordinatorStatus,
    EntryInfo,
    JournalChoice,
    JournalVote,
    Message,
    RankReading,
    RanksWarning,
    RestoreChoice,
    RestoreVote,
    StartRun,
    StoredEntry,
    UnusedByAll,
    UnusedNames,
)
from .. import ray_cluster
from .attempt import ANOTHER_RUN, Phase
from .node_census import NodeCensus
from .opened import REPLACED, OpenedRepository
from .requests import handle
from .save_costs import newest_records
from .segments import stored_entries
from .status import failed_attempts, open_attempts

logger = logging.getLogger(__name__)

UNUSED = 30.0
"""Seconds without any call after which a coordinator ends, unless ranks are connected to node workers."""

_FENCED = 3600.0  # the same for one that was fenced: another one would take the repository back from the other run

_TICK = 0.5  # seconds between checks of deadlines and nodes
_SOON = 5.0  # seconds that a run that starts waits for the store to say whether the repository is still there

_Answer = TypeVar("_Answer", bound=Message)


class CoordinatorActor:
    """Lets calls wait for the state machine, and runs its store operations in threads.

    Ends itself when it has been ``unused`` for so many seconds, unless it alone knows of a save in memory that can be restored.
    A process that calls it later starts another one, which finds all else in the repository and with the node workers.
    ``place``: of the store's settings. Callers send these, since Ray keeps the arguments of a constructor.
    """

    def __init__(self, uri: str, unused: float = UNUSED, place: str = "") -> None:
        actor_environment.enter(settings_sent=bool(place))
        self._uri, self._settings = uri, JobSettings(StoreAddress(uri, place), lambda: ask_for_settings(uri))
        self._opened: OpenedRepository | None = None
        self._starting = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._reported: tuple[OpenedRepository | None, tuple[int, ...]] = (None, (0, 0, 0))
        self._restoring, self._recalling = asyncio.Lock(), asyncio.Lock()
        self._in_store: dict[EntryInfo, StoredEntry] = {}  # the entries that the store has, when all ranks voted last
        self._choices: tuple[object, dict[str, RestoreChoice]] = (None, {})  # by attempt, since this change of the rounds
        self._shared: tuple[RestoreChoice, ray.ObjectRef] | None = None  # the last one in the object store
        self._keeper: asyncio.Task[None] | None = None
        self._census = NodeCensus(ray_cluster.alive_nodes, ray_cluster.leaving_nodes)
        self._chores: asyncio.Task[None] | None = None
        self._exporting: asyncio.Task[None] | None = None
        self._sweep: asyncio.Task[None] | None = None  # deletes the objects of abandoned attempts
        self._look: asyncio.Task[RaystowError | None] | None = None  # whether the repository is still there
        self._looked = 0  # the number of starts when it was asked last
        self._abandoned: set[tuple[int, str]] = set()  # attempts of repositories that are gone
        self._fenced: tuple[Fenced, str] | None = None  # by another run, with the job that was fenced
        self._job, self._starts = "", 0
        self._unused, self._used, self._calls = unused, SYSTEM.monotonic(), 0
        self._farewell: asyncio.Task[None] | None = None  # ends this actor, unless ranks are connected
        self._errors = background.ErrorLog("coordinator")

    async def start(self, run: StartRun | None = None) -> CoordinatorStarted:
        """Make or open the repository and take the next epoch. Only the first call does anything, and that of a ``run`` that
        begins after another run took over: a training that is started later is the one that is meant."""
        self._starts += 1
        number = self._starts
        async with self._starting:
            if self._keeper is None:
                self._keeper = asyncio.create_task(self._keep())
            if run is not None:
                await self._forget_if_gone(number)
                if self._fenced is not None:
                    error, job = self._fenced
                    if job == run.job and run.on_fenced == "raise":  # the same training, restarted: both would alternate
                        raise error
                    await self._take_over(self._opened)
                self._job = run.job
            if self._opened is None:
                names = self._uri, self._settings, self._owner()
                self._opened = await asyncio.to_thread(OpenedRepository, *names, self._abandoned)
                gc_pause.collect_rarely()
            committer = self._opened.committer
        catalog = committer.catalog
        return CoordinatorStarted(catalog.id, catalog.trust.keys, committer.epoch, number)

    async def _forget_if_gone(self, number: int) -> None:
        """Forget a repository that was deleted or replaced: a training that starts now uses the one that is there, or a new one.

        ``number``: of the start. One question to the store serves all starts that came before it is asked.
        """
        if (at := self._opened) is None or number <= self._looked:
            return
        self._looked = self._starts
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(asyncio.to_thread(at.gone, in_use=at.in_use))
        await asyncio.wait([self._look], timeout=_SOON)
        if not self._look.done() or (gone := self._look.result()) is None:
            return
        if isinstance(gone, Fenced):
            await self._retake(at)
            return
        about(logger, repository=self._uri).warning("this coordinator begins anew: %s", gone.what)
        self._opened, self._fenced, self._in_store = None, None, {}
        async with self._restoring:
            at.give_up(gone)
        self._abandoned |= {(attempt.id, attempt.attempt) for attempt in at.core.attempts}
        self._sweep = asyncio.create_task(asyncio.to_thread(at.upkeep.discard, at.core.abandoned()))
        await self._tell(at)

    async def overview(self) -> CoordinatorStatus | None:
        """The status; None before ``start``."""
        if (at := self._opened) is None:
            return None
        core, now, newest = at.core, SYSTEM.monotonic(), at.known.newest
        age = None if newest is None else SYSTEM.now() - newest.created
        attempts = open_attempts(core.attempts, now), failed_attempts(core.attempts, now)
        repository, epoch = at.committer.catalog.id, at.committer.epoch
        return CoordinatorStatus(self._uri, repository, epoch, newest, age, core.aborted_in_a_row, *attempts)

    async def handle(self, protocol: str, data: bytes) -> tuple[bytes, ray.ObjectRef | None]:
        """Answer a request of a rank or node worker: one of ``COORDINATOR_REQUESTS``, encoded.

        A choice, which may take megabytes, comes through the object store: once to each node, and not to each rank.
        """
        with self._serving(protocol):
            answer = await self.answer(messages.decode(data, *messages.COORDINATOR_REQUESTS))
        if not isinstance(answer, RestoreChoice) or answer == RestoreChoice(answer.entry):
            return messages.encode(answer), None
        if self._shared is None or not answer.has_parts_of(self._shared[0]):
            self._shared = answer, ray.put(messages.encode(answer))
        return b"", self._shared[1]

    @contextlib.contextmanager
    def _serving(self, protocol: str) -> Iterator[None]:
        messages.check_protocol(protocol, f"the caller of the coordinator of {self._uri}")
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._used = SYSTEM.monotonic()

    async def answer(self, request: CoordinatorRequest[_Answer]) -> _Answer:
        """Answer one of ``COORDINATOR_REQUESTS``; it may be ``RanksWarning``, too."""
        return cast(_Answer, await self._answer(request))

    async def _answer(self, request: Message) -> Message:
        match request:
            case messages.OpenStore(_, settings):
                self._settings.use(settings)
            case StartRun():
                return await self.start(request)
            case messages.FindOutcome(id, attempt):
                return messages.Committed(await self._outcome(id, attempt))
            case messages.OpenSegment(newest):
                return (await self._started()).segments.open(newest)
            case messages.SegmentStored():
                (await self._started()).segments.stored(request)
                async with self._changed:
                    self._changed.notify_all()
            case RestoreVote():
                return await self._settle(request)
            case UnusedNames():
                return await self._compare(request)
            case JournalVote():
                return await self._replay(request)
            case messages.CompareReplicas():
                return await self._compare_restored(request)
            case messages.RequestExport():
                at = await self._started()
                at.core.check_member(request)
                at.upkeep.exports.request(request.export, _keep_best(request.retention))
            case RankReading():
                at = await self._started()
                async with self._restoring:
                    at.rounds.reading(request)
                    if not request.quiet:
                        at.replays.reading(request)
            case _:
                return await self._handle(request)
        return Acknowledged()

    async def _handle(self, request: Message) -> Message:
        """Let the state machine handle a request, and wait for its answer."""
        if isinstance(request, Begin) and self._fenced is not None and request.request.on_fenced == "raise":
            raise self._fenced[0]
        at = await self._started()
        match request:
            case messages.PartStored(ticket) if at.core.find(ticket.attempt) is None:
                # An earlier coordinator may have committed it.
                return messages.Committed(await self._outcome(ticket.id, ticket.attempt))
            case messages.AskNextSave(seconds=None):
                async with self._recalling:
                    if not at.core.costs.recalled:  # see ``save_schedule``
                        at.core.costs.recall(await asyncio.to_thread(newest_records, at.committer.catalog))
            case Begin(_, asked) if asked.rank == 0:
                while at.upkeep.exports.failures:
                    at.core.notices.append(at.upkeep.exports.failures.popleft())
        try:
            answer = handle(at.core, request)
            if isinstance(request, Begin) and (order := request.request.export) is not None and not at.upkeep.exports.ordered:
                at.upkeep.exports.request(order, _keep_best(request.request.retention))
            if isinstance(request, messages.JoinRun):
                async with self._restoring:
                    at.rounds.left(request.rank, request.incarnation)
                    at.replays.left(request.rank, request.incarnation)
        finally:
            await self._tell(at)
        while (found := answer()) is None:
            async with self._changed:
                await self._changed.wait_for(lambda: answer() is not None)
        await self._tell(at)  # a part that has waited may have joined meanwhile
        return found

    async def _outcome(self, id: int, name: str) -> Entry:
        """Return the entry of the version that an attempt has become, once it is over. Raises what ``outcome_in`` raises."""
        at = await self._started()
        attempt, root = at.core.find(name), at.committer.catalog.root
        if attempt is not None:
            async with self._changed:
                await self._changed.wait_for(lambda: attempt.phase.over)
            if not isinstance(attempt.failure, OutcomeUnknown):
                return attempt.result()
            return outcome_in(await asyncio.to_thread(root), id, name)
        # This coordinator's epoch has replaced the one that the attempt belongs to: no write of that is under way any more.
        return outcome_in(await asyncio.to_thread(root), id, name, over=True)

    async def _settle(self, vote: RestoreVote) -> RestoreChoice | RanksWarning | Acknowledged:
        """Take a rank's vote on the version to restore. Returns the version to restore, or the one that all have restored."""
        at = await self._started()
        at.core.check_member(vote)
        async with self._restoring:
            in_memory = await self._newest_in_memory(at) if vote.tried is None else None
            round = await asyncio.to_thread(at.rounds.vote, vote, in_memory)
            at.core.restores(vote, exists=bool(round.candidates))
            at.core.restored(at.rounds.restored())
        await self._tell(at)
        await self._within(vote.timeout, lambda: round.answers(vote.tried) or round.warns(vote))
        if not round.answers(vote.tried):
            return round.waits(vote)
        entry = round.answer(vote.tried)
        if entry is None:
            return Acknowledged()
        if entry == vote.tried:
            return RestoreChoice(entry, group=messages.RestoreGroup(round.group.round))  # without all nodes
        if round.held is not None and entry == round.held.entry:
            return replace(round.held, group=round.group, alike=round.alike, trace=round.span.trace)
        async with self._restoring:
            choice = await self._choice(at, entry.attempt, lambda: (entry, b""))
            return replace(choice, group=round.group, alike=round.alike, trace=round.span.trace)

    async def _compare(self, report: UnusedNames) -> UnusedByAll | RanksWarning:
        """Take the names that a rank leaves unused. Returns those that all ranks leave unused."""
        at = await self._started()
        at.core.check_member(report)
        async with self._restoring:
            round = at.rounds.compare(report)
        await self._tell(at)
        await self._within(report.timeout, lambda: round.has_compared or round.warns(report))
        if not round.has_compared:
            return round.waits(report)
        return UnusedByAll(round.unused_by_all())

    async def _compare_restored(self, request: messages.CompareReplicas) -> Message:
        """Take what a rank holds after a restore. Returns what ranks hold differently, or questions."""
        at = await self._started()
        at.core.check_member(request)
        round, rank = at.restored.take(request), request.rank
        await self._tell(at)
        if not await self._within(request.timeout, lambda: round.answer(rank) is not None):
            what = f"ranks {sorted(round.missing)[:8]} have not compared what they hold after {request.timeout:.0f} s"
            raise DeadlineExceeded(what, subject=self._uri, remedy="restore with verify_replicas=True on all ranks")
        answer = round.answer(rank)
        assert answer is not None
        return answer

    async def _replay(self, vote: JournalVote) -> JournalChoice | RanksWarning:
        """Take a rank's vote on the step to replay to, and answer when all ranks have voted, or with ``RanksWarning``."""
        at = await self._started()
        at.core.check_member(vote)
        async with self._restoring:
            held = await self._journal_entries(at.committer.catalog) if at.replays.chooses(vote) else {}
            round = at.replays.vote(vote, lambda: held)
        await self._tell(at)
        if not await self._within(vote.timeout, lambda: round.answers(vote)):
            return RanksWarning()
        choice = round.answer(vote)
        return replace(choice, entries=tuple(replace(one, stored=self._in_store.get(one.info)) for one in choice.entries))

    async def _journal_entries(self, catalog: Catalog) -> Mapping[str, Sequence[EntryInfo]]:
        """The entries that nodes and the store have."""
        held = await journal_entries(catalog.id)
        try:
            root = await asyncio.to_thread(catalog.root)
            self._in_store = await asyncio.to_thread(stored_entries, catalog, root)
        except RaystowError as error:
            about(logger, repository=self._uri).warning("the store is not searched for recorded steps: %s", error)
            self._in_store = {}
        return {**held, messages.STORE: tuple(self._in_store)}

    async def _choice(self, at: OpenedRepository, attempt: str, describe: Callable[[], tuple[Entry, bytes]]) -> RestoreChoice:
        """The restore choice of an attempt. ``describe``: its entry, and its record if it is not a version yet. The contents of
        node memories are requested once for all ranks, and again after a change of any round."""
        if self._choices[0] != (at, at.rounds.changes):
            self._choices = (at, at.rounds.changes), {}
        choices = self._choices[1]
        if attempt not in choices:
            entry, promised = describe()
            near = await holders(at.committer.catalog.id)
            known = {entry: promised} if promised else {}
            record = at.committer.record
            choices[attempt] = RestoreChoice.of(entry, at.known.entries, near, lambda of: known.get(of) or record(of))
        return choices[attempt]

    async def _newest_in_memory(self, at: OpenedRepository) -> RestoreChoice | None:
        """The newest save that is not a version but is complete in the memory of live nodes."""
        for record in () if at.committer.signs else at.core.held():
            choice = await self._choice(at, record.attempt, functools.partial(_promised, record))
            if all(info.node in choice.near for info in record.fragments):
                return choice
        return None

    async def _started(self) -> OpenedRepository:
        if self._opened is None or self._starting.locked():
            await self.start()
        assert self._opened is not None
        return self._opened

    async def _tell(self, at: OpenedRepository) -> None:
        """Wake the waiting calls if anything has changed: waking thousands of them at each of ten thousands of calls takes
        minutes."""
        news = at, at.changes
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

    async def _keep(self) -> None:
        """Look after the saves and this actor: at once for a commit, else periodically."""
        while True:
            try:
                if self._opened is not None:
                    await self._look_after(self._opened)
                self._end_if_unused()
            except Exception as error:
                self._errors.note(error)
            await self._within(_TICK, lambda: self._opened is not None and self._opened.has_commit)

    async def _look_after(self, at: OpenedRepository) -> None:
        """Commit complete attempts; check deadlines and nodes."""
        core, committer = at.core, at.committer
        while (attempt := core.next_commit()) is not None:
            trace = attempt.span.trace
            outcome = await asyncio.to_thread(at.upkeep.commit, core.record(attempt), trace)
            if attempt.phase.over:  # the repository was found deleted meanwhile
                continue
            core.settled(attempt, outcome)
            if isinstance(outcome, Fenced):
                self._fenced = Fenced(outcome.what, subject=self._uri, remedy=ANOTHER_RUN), self._job
                if attempt.takes_over or committer.replaced:
                    await self._take_over(at)
            await self._tell(at)
            at.known.committed(committer.root)
            if attempt.phase is Phase.COMMITTED and attempt.retention is not None:
                at.upkeep.due = attempt.retention, trace
            if attempt.phase is Phase.COMMITTED and attempt.export is not None:
                at.upkeep.exports.request(attempt.export, _keep_best(attempt.retention), trace)
            attempt.export = None  # it may have megabytes of files
        if at.upkeep.due is not None and (self._chores is None or self._chores.done()):
            (policy, trace), at.upkeep.due = at.upkeep.due, None
            self._chores = asyncio.create_task(asyncio.to_thread(at.upkeep.apply_retention, policy, core.bases, trace))
        if at.upkeep.exports.due and (self._exporting is None or self._exporting.done()):
            self._exporting = asyncio.create_task(asyncio.to_thread(at.upkeep.export))
        if (opened := at.segments.next_commit()) is not None:
            try:
                await asyncio.to_thread(at.segments.commit, opened)
            finally:
                at.segments.settled(opened)
            if committer.replaced:
                await self._retake(at)
        core.tick()
        async with self._restoring:
            await asyncio.to_thread(at.rounds.tick)
            at.replays.tick()
        await self._census.look(core, _TICK)
        await self._tell(at)
        if (self._sweep is None or self._sweep.done()) and (abandoned := core.abandoned()):
            self._sweep = asyncio.create_task(asyncio.to_thread(at.upkeep.discard, abandoned))  # which no commit waits for
        at.measure()

    def _end_if_unused(self) -> None:
        """End for good if this coordinator has not been used for long, and has nothing that another one would not find."""
        if self._is_in_use():
            self._used = SYSTEM.monotonic()
        patience = self._unused if self._fenced is None else max(self._unused, _FENCED)
        if SYSTEM.monotonic() >= self._used + patience and (self._farewell is None or self._farewell.done()):
            self._farewell = asyncio.create_task(self._end_unless_connected(self._used))

    async def _end_unless_connected(self, used: float) -> None:
        """End unless ranks are connected, which may save after this pause. ``used``: see ``_used``; a later call prevents it."""
        try:
            if await ranks_connected(self._uri):
                self._used = SYSTEM.monotonic()
            elif self._used == used and not self._is_in_use():
                about(logger, repository=self._uri).info("the coordinator ends: unused for %.0f s", self._unused)
                ray.kill(ray.get_runtime_context().current_actor)
        except Exception as error:
            self._errors.note(error)

    def _is_in_use(self) -> bool:
        at_work = any(task is not None and not task.done() for task in (self._chores, self._sweep, self._exporting))
        return self._calls > 0 or at_work or (self._opened is not None and self._opened.in_use)

    async def _take_over(self, at: OpenedRepository | None) -> None:
        """Take the next epoch again, although another run has taken one meanwhile."""
        if at is not None:
            await asyncio.to_thread(at.committer.take_over, self._owner())
            about(logger, repository=self._uri).warning("this run has taken over the repository, epoch %d", at.committer.epoch)
        self._fenced = None

    async def _retake(self, at: OpenedRepository) -> None:
        """Take the next epoch where a repair or a backup has replaced the root. No save that began before becomes a version."""
        at.core.give_up(Fenced(REPLACED, subject=self._uri, remedy="nothing; later saves go on"))
        await self._take_over(at)
        await self._tell(at)

    def _owner(self) -> str:
        """A name that no other coordinator has, for messages about two runs with one repository."""
        return f"{ray_cluster.process_here('coordinator')}, {ray_cluster.run_here()} ({SYSTEM.token()})"


def _keep_best(policy: Policy | None) -> Best | None:
    return policy.keep_best if policy is not None else None


def _promised(record: VersionRecord) -> tuple[Entry, bytes]:
    data = record.dump()
    return record.entry(stored_digest(data), len(data)), data
