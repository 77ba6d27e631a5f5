"""``Checkpointer``: saves and restores the state of one rank of a training."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...state.lossy.profiles import Lossy
from ...state.omissions import SavedState
from ...state.planner import Planner, SavePlan, plan_save, tensors_of
from ...state.tree import State, contains_placeholders
from ...storage.arguments import integer
from ...storage.errors import RaystowError, StateError
from ...storage.log import about
from ...storage.notebook import facts_table
from ...storage.object_store import ObjectStore
from ...storage.repository import Repository
from ...storage.retention.export_rule import Export
from ...storage.retention.policy import Policy
from ...storage.runtime.clock import SYSTEM
from ...storage.runtime.metrics import FAILED_SAVES, STALL, record
from ...storage.stores import open_store
from ...storage.versions.version import Version
from ...storage.versions.version_selector import LATEST, VersionSelector, selector_text
from ...workers.protocol import messages
from ...workers.protocol.messages import START
from ...workers.staging.plan import SaveOrder
from ...workers.staging.progress import SaveProgress
from .. import argument_checks, ray_cluster
from ..argument_checks import LONGEST, metrics_of, positive
from ..coordinator.delta_schedule import AUTO, Delta
from ..coordinator.housekeeping import kept_by_a_run
from ..restore.name_patterns import NameRules
from ..restore.planner import RestoreOptions
from . import exit_notice
from .due_steps import DueSteps, next_save
from .export_order import export_order
from .failure_reports import FailureReports
from .failures import Failures
from .gpu_coding import GpuCodingChoice
from .node_connection import NodeConnection
from .options import Compression, Interval, Memory, Replication, option, usable_codec
from .outcome_subscribers import OutcomeSubscribers
from .pending import Pending
from .provenance import Provenance
from .rank_discovery import placement
from .restores import Restores
from .save_settings import SaveSettings, Values
from .saves_in_flight import SavesInFlight
from .startup import Startup
from .state_notices import StateNotices
from .version_callbacks import VersionCallback, VersionCallbacks

if TYPE_CHECKING:
    import torch

    from ..journal.journal import Journal
    from ..journal.recorder import StepRecorder

logger = logging.getLogger(__name__)


class Checkpointer:
    """Save and restore the state of one rank. Each training process makes one; they need not start at the same time.

    The constructor returns while the coordinator and the node worker start. The first ``save`` or ``restore`` waits for them, and
    raises ``ClusterError``, ``StoreError`` or ``UnsafeStore`` if they could not start.

    Args:
        uri: The repository: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``, ``file:///path`` or a
            path. It is created if it does not exist.
        rank: The rank of this process, with ``world_size``. None: that of Ray Train, torch.distributed or ``RANK`` in the
            environment, which must not contradict each other; 0 if there is none of these.
        world_size: The number of ranks, with ``rank``. None: from the same sources; 1 if there is none.
        retention: The versions to keep. After each save the coordinator applies the policy, deletes versions that were dropped
            more than an hour ago (a minute on a disk that is nearly full), and compacts deltas. None: every version is kept.
        timeout: Seconds after which a save that is not durable fails; also the longest time that ``fence`` waits.
        max_in_flight: Saves that may be in flight. A further ``save`` waits for the oldest one.
        on_failure: "raise": the next ``save`` or ``fence`` raises ``SaveFailed`` for the first failed save. "warn": failed saves
            are only logged and counted in ``failures``. An integer n: ``SaveFailed`` is raised after n failures in a row, and by
            ``wait`` and ``close`` if the newest save failed.
        on_fenced: When another run has taken over the repository or a rank. "raise": the next ``save`` or ``fence`` raises
            ``Fenced``, which names the other run. "takeover": the next save takes the repository over from it.
        on_difference: When ranks hold other bits of the same tensor; see ``docs/replicas.md``. "warn": a warning of rank 0 names
            ranks and tensor. "raise": the save fails.
        compare_replicas: The tensors that ranks compare in each save: "all", "small" (up to 1 MiB), or "off".
        memory: Host memory for saves and for cached versions. An integer is ``Memory(staging=...)``, in bytes.
        compression: How tensors are encoded. A string is ``Compression(codec=...)``.
        replication: How many other nodes hold a copy of the newest version in memory. An integer is their number.
        callbacks: Rank 0 tells each of them of every durable version, in the background; see ``raystow.trackers``.
        interval: When ``due`` tells to save. An integer is ``Interval(steps=...)``. By default, that which loses the least time.
        notes: Plain values by name for each version, see ``Version.notes``; what looks like a key is left out.
        export: Which versions are exported for inference, and where.
        parts: The names of the parts that actors outside the ranks save; see ``Part``. The same on all ranks.

    Attributes:
        uri: The address of the repository.
        rank, world_size: The rank of this process, and the number of ranks.
        failures: The failed saves of this rank: ``total``, and ``in_a_row`` since the last save that became durable.

    Raises:
        StateError: An argument is invalid; nothing has been started then.
        ClusterError: No Ray cluster is running.

    Example:
        >>> with raystow.Checkpointer("s3://bucket/run", memory=2 << 30) as checkpointer:
        ...     checkpointer.guard(optimizer)
        ...     checkpointer.restore(into=state)
        ...     checkpointer.save(state, step=100)
    """

    _part = ""

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        retention: Policy | None = None,
        timeout: float = 600.0,
        max_in_flight: int = 2,
        on_failure: str | int = 10,
        on_fenced: messages.OnFenced = "raise",
        on_difference: str = "warn",
        compare_replicas: str = "all",
        memory: int | Memory = Memory(),  # noqa: B008 (frozen)
        compression: str | Compression = Compression(),  # noqa: B008
        replication: int | Replication = Replication(),  # noqa: B008
        interval: int | Interval = Interval(),  # noqa: B008
        callbacks: Sequence[VersionCallback] = (),
        notes: Mapping[str, object] | None = None,
        export: Export | None = None,
        parts: Sequence[str] = (),
    ) -> None:
        address = argument_checks.address(uri)
        self._store, retention = self._open(address), kept_by_a_run(retention, address)
        self.uri = self._store.uri
        self.rank, self.world_size = (0, 1) if self._part else placement(rank, world_size)
        self._log = about(logger, repository=self.uri, rank=self.rank)
        self.failures = Failures(on_failure, count=lambda: record(FAILED_SAVES, repository=self.uri))
        self._timeout, limit = positive("timeout", timeout, most=LONGEST), integer("max_in_flight", max_in_flight, least=1)
        self._memory, self._interval = option("memory", memory, Memory, int), option("interval", interval, Interval, int)
        self._compression = option("compression", compression, Compression, str)
        self._replication = option("replication", replication, Replication, int)
        delta: Delta = AUTO if self._compression.delta is None else self._compression.delta
        lossy, self._codec = Lossy.of(self._compression.lossy), usable_codec(self._compression.codec)
        provenance = Provenance(1 if self._part else self.rank, notes, ray_cluster.entrypoint)
        more = provenance, export_order(export, retention, self.rank), argument_checks.part_names(parts)
        self._settings = SaveSettings(self._timeout, retention, lossy, delta, on_fenced, on_difference, compare_replicas, *more)
        to_call = VersionCallbacks(callbacks if self.rank == 0 else (), self._log)
        if lossy.rules and self.rank == 0:
            self._log.warning("tensors are stored with fewer bits, as Compression.lossy specifies: %s", lossy)
        self._gpus, self._planner = GpuCodingChoice(self._compression, self._codec), self._settings.planner()
        self._saves, self._closed = itertools.count(1), False
        self._recorder: StepRecorder | None = None
        self._restored: tuple[int, bool] = (START, True)  # the step, and whether the latest version was asked for
        who = self.rank, self.world_size, self._part, self._settings.export_request
        self._startup = Startup(self._store, *who, on_fenced=on_fenced, keep=self._memory.cache_seconds)
        self._restores = Restores(self._startup, self._timeout)
        self._notices = StateNotices(self.rank, self._restores)
        reports = FailureReports(self._startup.report_failure, self._log), to_call
        self._due_steps = DueSteps(functools.partial(next_save, self._startup, on_fenced), self._log)
        self._subscribers = OutcomeSubscribers(self.failures, *reports, uri=self.uri)
        self._in_flight = SavesInFlight(self._startup, self._subscribers, limit=limit, timeout=self._timeout, log=self._log)
        self._node = NodeConnection(self._startup, (self._memory, self._compression, self._replication), codec=self._codec)
        exit_notice.watch(self._in_flight, self.failures)

    @property
    def repository(self) -> Repository:
        """The repository, whose versions can be listed and read. Waits, and raises, as the first ``save``."""
        self._check_open()
        return self._startup.repository()

    def __repr__(self) -> str:
        return f"Checkpointer({self.uri!r}, {', '.join(f'{name} {value}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        return facts_table(f"Checkpointer of {self.uri}", self._facts())

    def _facts(self) -> dict[str, object]:
        facts = {"rank": f"{self.rank} of {self.world_size}", "steps in flight": [*self._in_flight.steps().values()] or "none"}
        return {**facts, "failed saves": self.failures.total, **({"state": "closed"} if self._closed else {})}

    def due(self, step: int, interval: Interval | None = None) -> bool:
        """Tell whether to save this step: by ``interval``, when Ray will remove a rank's node, or after ``save_now``.

        All ranks get the same answer. Call it on every rank with the same steps, in ascending order; after a restore they may
        begin anew. If the coordinator does not answer for 20 s, only steps of ``Interval(steps=)`` are due until it does.

        Args:
            step: The step, as it would be given to ``save``.
            interval: Instead of the constructor's.

        Returns:
            Whether to save.

        Raises:
            StateError: ``step`` is not an integer of at least 0, or this ``Checkpointer`` is closed.
            Fenced: Another run has taken over the repository.
        """
        self._check_open()
        step, interval = integer("step", step, least=0), self._interval if interval is None else interval
        due = self._due_steps.due(step, interval)
        return due or (interval.steps is not None and step > 0 and step % interval.steps == 0)

    def save_now(self) -> None:
        """Let ``due`` tell all ranks to save within about two seconds. Any rank may call it, in any thread or signal handler."""
        self._due_steps.request()

    def save(self, state: State, *, step: int, metrics: Values | None = None, cut: Values | None = None) -> Pending:
        """Start to save ``state``. Every rank saves the same steps in the same order.

        Returns before the save is durable. Plain values, arrays, inference tensors, and in host memory tensors of up to 64 KiB
        and those in shared memory may change then: they are copied, or, if large, read before. Other tensors are read in the
        background: do not change them before ``fence`` returns. A save fails if torch's version counter shows that one was
        changed. An operation that runs while its tensor is read counts only if it ends within twice the time of reading (up to
        2 s). Writes through ``.data``, ``numpy()``, ``from_numpy`` or DLPack, by ``fused=True`` optimizers, collectives, CUDA
        graphs, kernels and other processes do not count; of these only changes of a few compared elements are found.
        Plain tensors and arrays must be equal on all ranks, as each save checks, and are stored once; of a DTensor each rank
        stores its own shards; plain values are stored for each rank.

        Args:
            state: A dict with string or integer keys of objects with ``state_dict`` and ``load_state_dict`` (modules, optimizers,
                loaders), ``PerRank``, ``Rng``, tensors, numpy arrays, numbers, strings, bytes, None, and dicts, lists and tuples
                of these.
            step: The training step, from 0 to 2**63 - 1.
            metrics: Plain values by name. The version has those of rank 0; a warning names what other ranks pass otherwise.
            cut: Plain values by name, which rank 0 passes to the parts that wait for this save.

        Returns:
            The save in flight. Its ``result()`` waits for the version.

        Raises:
            StateError: The state holds something that cannot be stored; the message names its path. Nothing is written.
            SaveFailed: Earlier saves failed and ``on_failure`` asks to raise. Nothing is saved by this call; the next call saves.
            OutcomeUnknown: The same, for a save that may or may not be a version.
            Fenced: Another run has taken over the repository. Every further call raises it, too.
        """
        number, start = next(self._saves), SYSTEM.monotonic()  # also of a save that raises here, on this rank alone
        self.failures.check()
        step, values = integer("step", step, least=0), [metrics_of(metrics), metrics_of(cut, "cut")]
        self._check_open()
        self._startup.wait()
        plan = self._plan(state, planner=self._planner, save=number)
        self._in_flight.wait_for_oldest()
        past = self._in_flight.restored, self._restores.past
        request = self._settings.request(self._startup.member, *past, number, step, *values)
        if self._recorder is not None:
            self._recorder.saved(step)
        progress = SaveProgress(step, number=number, uri=self.uri, log=self._log)
        self._notices.report(progress.warn, SavedState(state, plan), step)
        outcome = self._in_flight.begin(progress)
        with progress.blocking(start):
            try:
                self._node.staging(plan).submit(SaveOrder(request, plan, progress, outcome.report))
            except RaystowError as error:
                outcome.report(error)
        if plan.writes.exposed:
            self._in_flight.wait_until_read(self._node.give_up)
        record(STALL, SYSTEM.monotonic() - start, repository=self.uri, call="save")
        return Pending(outcome)

    def fence(self) -> None:
        """Wait until all tensors given to ``save`` have been read; they may change after this call.

        If a save has not been read after ``timeout`` seconds, it fails; its tensors are not read any more and may change.

        Raises:
            SaveFailed: Saves failed and ``on_failure`` asks to raise. The tensors may change then, too.
            OutcomeUnknown: The same, for a save that may or may not be a version.
            Fenced: Another run has taken over the repository.
        """
        self._startup.check_process()
        start = SYSTEM.monotonic()
        if self._in_flight.wait_until_read(self._node.give_up):
            record(STALL, SYSTEM.monotonic() - start, repository=self.uri, call="fence")
        self.failures.check()

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Call ``fence`` before every step of an optimizer, until ``close``.

        Args:
            optimizer: A ``torch.optim.Optimizer``.
        """
        self._in_flight.guard(optimizer, self.fence)

    def journal(self, model: torch.nn.Module, *optimizers: torch.optim.Optimizer, durable_every: int = 0) -> Journal:
        """Record every optimizer step from now on, so that a failure loses one step at most. See ``docs/journal.md``.

        Every rank calls it once, and then ``replay``. The entries are in the memory of this node (``Memory(journal=...)``) and
        of as many other nodes as have copies of the newest version (``Replication``).

        Args:
            model: The model, whose parameters are checked after each replayed step, and whose buffers are recorded.
            optimizers: The optimizers that change it.
            durable_every: Also store the entries, each time that this many steps are recorded, so that the newest of these steps
                is reached even if all nodes have failed. 0 for never. Training does not wait for it.

        Returns:
            The journal. ``close`` of this Checkpointer closes it.

        Raises:
            StateError: There is a journal already, no optimizer, or one that needs a closure, or ``durable_every`` is invalid.
        """
        self._check_open()
        if self._recorder is not None or not optimizers:
            what = "there is a journal already" if optimizers else "there are no optimizers"
            raise StateError(what, subject=self.uri, remedy="make one journal, with all optimizers")
        from ..journal.journal import Journal
        from .journal_connection import step_recorder

        options = self._memory, self._replication, self._timeout, durable_every
        self._recorder = step_recorder(self._startup, model, optimizers, options)
        self._recorder.restored(*self._restored)
        self._subscribers.save_failed = self._recorder.save_failed
        return Journal(self._recorder)

    def restore(
        self,
        into: State,
        version: VersionSelector = LATEST,
        *,
        strict: bool = True,
        allow_missing: str | Sequence[str] = (),
        allow_unused: str | Sequence[str] = (),
        cast: bool = False,
        allow_uncommitted: bool = True,
        verify_replicas: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Version | None:
        """Fill ``into`` from a version. Every rank calls this with the same ``version``, and all restore the same one.

        Bytes come from the memory of nodes if they are cached there, else from the store. Then the first save is prepared.

        Args:
            into: See ``raystow.restore``.
            version: An id, the name of a pin, ``"step:60"`` (the newest version of that step), a ``Version``, or ``"latest"``:
                the newest one. If that is damaged for one rank, all ranks restore the newest whole one before it, with an
                error in the log.
            strict: See ``raystow.restore``.
            allow_missing: See ``raystow.restore``.
            allow_unused: See ``raystow.restore``. A name is unused if no rank restores it.
            cast: Whether to convert to the dtypes of ``into``; else another dtype is an error.
            allow_uncommitted: Whether the latest version may be a save that is not durable yet, or could not be uploaded, if all
                of it is in the memory of the nodes.
            verify_replicas: Whether to compare afterwards what the ranks hold of the same tensors; see ``docs/replicas.md``.
            progress: Called with the decoded bytes of each chunk, from several threads. None: rank 0 shows a progress bar in a
                terminal or notebook, after two seconds.

        Returns:
            The version, or None if the latest one is asked for and there is none.

        Raises:
            StateError: See ``raystow.restore``; or ``version`` is another one than on another rank.
            NotFound: There is no such version.
            Damaged: The version is damaged, or with ``"latest"`` no version is whole; or ranks hold other bits of the same tensor
                (``verify_replicas``). The content of ``into`` is undefined.
            Fenced: Another process has taken this rank.
            DeadlineExceeded: Another rank did not call, or did not read on, for ``timeout`` seconds.
        """
        self._check_open()
        names = NameRules.of(strict, allow_missing, allow_unused, part=self._part)
        asked = selector_text(version, self._startup.wait().repository)
        self.fence()
        options = RestoreOptions(self.rank, self.world_size, names, cast, self._part, self._settings.parts)
        run = functools.partial(self._restores.run, self._startup.repository(), into, options, self._in_flight.steps())
        restored = run(asked=asked, allow_uncommitted=allow_uncommitted, progress=progress)
        if verify_replicas and restored is not None:
            self._restores.compare(into)
        self._restored = (START if restored is None else restored.step), asked == LATEST
        if self._recorder is not None:
            self._recorder.restored(*self._restored)
        self._in_flight.restored = restored or self._in_flight.restored
        if not self._node.made:
            tree = tensors_of(into, self.rank)  # here, since the training changes objects
            self._node.prepare(lambda: None if contains_placeholders(tree) else self._plan(tree))
        return restored

    def restore_latest(
        self,
        into: State,
        *,
        strict: bool = True,
        allow_missing: str | Sequence[str] = (),
        allow_unused: str | Sequence[str] = (),
        cast: bool = False,
        allow_uncommitted: bool = True,
        verify_replicas: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Version | None:
        """Fill ``into`` from the latest version: ``restore`` without ``version``.

        Args:
            into: See ``restore``.
            strict: See ``restore``.
            allow_missing: See ``restore``.
            allow_unused: See ``restore``.
            cast: See ``restore``.
            allow_uncommitted: See ``restore``.
            verify_replicas: See ``restore``.
            progress: See ``restore``.

        Returns:
            The version, or None if there is none.
        """
        restore = functools.partial(self.restore, into, strict=strict, verify_replicas=verify_replicas, progress=progress)
        return restore(allow_missing=allow_missing, allow_unused=allow_unused, cast=cast, allow_uncommitted=allow_uncommitted)

    def prepare(self, state: State) -> None:
        """Prepare the first save of a state like this one, in the background.

        Connects to the node worker, and prepares memory, kernels and the plan of tensors on a GPU, as each restore does.

        Args:
            state: A state like those that will be saved. It is only read, and may change at any time.

        Raises:
            StateError: The state holds something that cannot be stored; the message names its path.
        """
        self._check_open()
        if not self._node.made:
            plan = self._plan(tensors_of(state, self.rank))
            self._node.prepare(lambda: plan)

    def wait(self) -> None:
        """Wait until all saves in flight are durable or have failed, each until its ``timeout``.

        If the newest save is not a version, rank 0 logs an error, which names the newest version.

        Raises:
            SaveFailed: Saves failed and ``on_failure`` asks to raise.
            OutcomeUnknown: The same, for a save that may or may not be a version.
            Fenced: Another run has taken over the repository.
        """
        self._startup.check_process()
        self._in_flight.wait_for_all(log=self.rank == 0)
        self.failures.check_last()

    def close(self) -> None:
        """Wait for the saves in flight as ``wait`` does, and for callbacks up to a minute; then disconnect from the node worker.

        Afterwards ``save`` and ``restore_latest`` raise ``StateError``, and another ``close`` does nothing. At the end of a
        ``with`` block that raises, failed saves are only logged. A process that ends without ``close`` waits up to 20 s, logs
        them, and has the exit status 120 where ``close`` would have raised.

        Raises:
            SaveFailed: As ``wait``; everything is released then, too.
            OutcomeUnknown: The same, for a save that may or may not be a version.
            Fenced: Another run has taken over the repository.
        """
        if self._release():
            self.failures.check_last()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self._release(failed=True)
        except Exception:  # must not take the place of the other one
            self._log.exception("the Checkpointer could not be closed")

    def _release(self, *, failed: bool = False) -> bool:
        """Wait for the saves in flight, and disconnect. Raises nothing because of failed saves. Returns whether it was open."""
        end = functools.partial(self._startup.close, failed=failed)
        end_saves = functools.partial(self._in_flight.close, log=self.rank == 0)
        open, self._closed = not self._closed, True
        if not open or self._startup.forked:
            return False  # in a child, saves, connections and threads are those of the parent
        with contextlib.ExitStack() as releases:  # called in the opposite order, each also if another one raises
            for release in self._subscribers.close, end, self._node.close, end_saves:
                releases.callback(release)
            if self._recorder is not None:
                releases.callback(self._recorder.close)
        return True

    def _open(self, address: str) -> ObjectStore:
        return open_store(address)

    def _declare(self, parts: Sequence[str]) -> None:
        """Declare these parts instead, before the first save and restore."""
        self._settings = replace(self._settings, parts=argument_checks.part_names(parts))

    def _plan(self, tree: object, *, planner: Planner | None = None, save: int = 1) -> SavePlan:
        return plan_save(tree, rank=self.rank, world_size=self.world_size, gpus=self._gpus.coding(), planner=planner, save=save)

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("this Checkpointer is closed", subject=self.uri, remedy="make another one")
        self._startup.check()
