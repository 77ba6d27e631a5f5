"""``Checkpointer``: what a training process holds."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..storage.arguments import integer
from ..storage.clock import SYSTEM
from ..storage.errors import ClusterError, DeadlineExceeded, RaystowError, StateError
from ..storage.format import key_files, values
from ..storage.format.root import Entry
from ..storage.log import about, here
from ..storage.metrics import DURABLE, FAILED_SAVES, RESTORE, STAGED, STALL, record
from ..storage.repository import Repository
from ..storage.retention.policy import Policy
from ..storage.stores import open_store
from ..storage.version import Version
from ..workers import ray_metrics
from ..workers.ipc.ring import slot_size
from ..workers.memory.host_memory import memory_limit
from ..workers.node_actor import node_actor
from ..workers.staging import CODECS, PLACES, Order, Staging
from . import arguments, cluster
from .agreement import Together
from .arguments import LONGEST, one_of, positive
from .codec import usable_codec
from .coordinator_actor import RayPort, coordinator_actor
from .failures import Failures
from .housekeeping import kept_by_a_run
from .lossy.choice import Lossy
from .lossy.rules import Asked
from .memory import share_of_memory
from .pending import Pending
from .placement import placement
from .planner import Planner, SavePlan, plan_save
from .restore import restore_latest
from .restoring import Vote
from .row import AUTO, Delta

logger = logging.getLogger(__name__)

_START = 120.0  # seconds that an actor may take to start
_LATE = 10.0  # seconds after the deadline of a save in which its outcome may still arrive


class Checkpointer:
    """Saves and restores the state of one rank. Make one in each training process; they need not be made at the same time.

    ``uri``: the repository, made when it does not exist. ``rank`` and ``world_size`` come from Ray Train or torch.distributed
    where those are in use. ``memory``: bytes of host memory that saving may take for this rank, staged and coded together; by
    default 1 GiB, and for a state on GPUs what it takes to hold one save of it, if that is no more than this rank's part of half
    the machine's memory. ``codec``: what tensors on a GPU are coded with; see ``docs/gpu.md``. ``compress_in``: the
    process that codes them, "training" (this one: costs the training least) or "node" (the node worker's: this one only copies
    them, into 256 MiB of device memory that both share).
    ``lossy``: which tensors are stored with less than all their bits, and how: "resume-bounded", "archive", or rules by group
    such as ``{"exp_avg": MantissaBits(5)}``; see ``docs/compression.md``. None: every bit is kept.
    ``timeout``: seconds after which a save that is not durable is given up, and the longest that ``fence`` waits.
    ``max_in_flight``: saves that may be under way; one more makes ``save`` wait for the oldest. ``retention``: what to keep; the
    coordinator applies it after each save, deletes what was dropped more than an hour ago, and writes differences whole whose
    base nothing else needs, where that takes less. None keeps every version. ``keep_in_memory``: bytes of the node's memory, not
    of each rank's, in which it keeps its part of the newest version to restore from; by default a quarter of the memory. What
    does not fit is not kept. ``replicas``: how many other nodes keep a copy of that in their memory (nodes with another label
    ``zone`` where there are such), sent at no more than ``replica_rate`` bytes per second for each node. ``delta``: how many
    versions in a row may be stored as differences to one that is whole, chunk by chunk where that is smaller and the whole one is
    in the node's memory; "auto": as many as pay, at most 16, as ``docs/tuning.md`` has it, and on a GPU none that ``fence``
    would wait for; None: all are whole. On a GPU they are so in any case with ``compress_in="node"`` or ``codec="ans"``.
    ``on_failure``: "warn": a failed save is counted in ``failures``, logged, and nothing else; "raise": the next ``save`` or
    ``fence`` raises its ``SaveFailed`` as well. ``max_failures``: so many in a row raise in either case; None: never.
    ``StateError`` for what cannot be, before anything is started.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        memory: int | None = None,
        codec: str = "auto",
        compress_in: str = "training",
        lossy: Mapping[str, Asked] | str | None = None,
        timeout: float = 600.0,
        max_in_flight: int = 2,
        on_failure: str = "warn",
        max_failures: int | None = 10,
        retention: Policy | None = None,
        keep_in_memory: int | None = None,
        replicas: int = 1,
        replica_rate: float | None = None,
        delta: Delta | None = AUTO,
    ) -> None:
        address = arguments.address(uri)
        self._store, self._retention = open_store(address), kept_by_a_run(retention, address)
        self.uri = self._store.uri
        found_rank, found_world = placement()
        self.rank = integer("rank", found_rank if rank is None else rank, least=0)
        self.world_size = integer("world_size", found_world if world_size is None else world_size, least=1)
        if self.rank >= self.world_size:
            raise StateError(f"rank {self.rank} of {self.world_size} cannot be", remedy="pass both rank= and world_size=")
        self._log = about(logger, repository=self.uri, rank=self.rank)
        self.failures = Failures(on_failure=on_failure, most=max_failures, count=self._count_failure, log=self._log)
        """The failed saves of this rank: ``total``, and ``in_a_row`` since the last that became durable."""
        self._memory = None if memory is None else arguments.memory_of_a_rank(memory)
        self._timeout = positive("timeout", timeout, most=LONGEST)
        self._max_in_flight = integer("max_in_flight", max_in_flight, least=1)
        self._keep_in_memory = None if keep_in_memory is None else integer("keep_in_memory", keep_in_memory, least=0)
        self._replicas = integer("replicas", replicas, least=0)
        self._replica_rate = None if replica_rate is None else positive("replica_rate", replica_rate)
        self._delta: Delta = (
            AUTO if delta == AUTO else 0 if delta is None else integer("delta", delta, least=1, instead='"auto" or None')
        )
        self._compress_in, self._lossy = one_of("compress_in", compress_in, PLACES), Lossy.of(lossy)
        self._codec = usable_codec(one_of("codec", codec, CODECS))
        cluster.connect()
        ray_metrics.export()
        here(node=cluster.node_here())
        if self._lossy.rules and self.rank == 0:
            self._log.warning("not every bit will be stored, as lossy= asks for: %s", self._lossy)
        self._incarnation = SYSTEM.token()
        self._saves, self._restores, self._planner = itertools.count(1), itertools.count(1), Planner(self._lossy)
        self._pending: list[Pending] = []
        self._staging: Staging | None = None
        coordinator = coordinator_actor(self.uri).start.remote()
        self._repository_id, self._signed_by = cluster.call(coordinator, _START, f"coordinator of {self.uri}")
        self._port = RayPort(self.uri)
        node_actor(RayPort)  # starts while the caller goes on, and is ready when the first save attaches
        self._port.join(self.rank, self._incarnation, self.world_size)

    def save(self, state: dict[str, Any], *, step: int, metrics: dict[str, Any] | None = None) -> Pending:
        """Begin to save ``state`` as of ``step`` (0 to 2**63 - 1); every rank calls this for the same steps in the same order.

        Returns when the state is checked and planned: tensors are staged in the background, and may change after ``fence``.
        Plain tensors and arrays are taken to be the same on every rank and stored once; DTensors say what they are; plain
        values are kept for each rank. ``metrics`` (plain values) of all ranks are merged into the version's.

        Raises ``StateError`` with the path of what cannot be stored, before a byte is written. A save that fails later does not
        raise here; its ``Pending.result()`` does, and a warning is logged. Raises ``SaveFailed`` for earlier saves if too many
        have failed or ``on_failure`` says so, and saves nothing then; called again, it saves.
        """
        start = SYSTEM.monotonic()
        self.failures.check()
        step, metrics = integer("step", step, least=0), arguments.metrics_of(metrics)
        who = {"rank": self.rank, "world_size": self.world_size}
        number = next(self._saves)
        plan = plan_save(state, **who, on_gpu=self._codec != "cpu", planner=self._planner, save=number)
        self._wait_for_room()
        pending = Pending(step, self._log)
        begin = {
            "save": number,
            "step": step,
            "timeout": self._timeout,
            "metrics": {name: values.encode(value) for name, value in metrics.items()},
            "values": plan.values,
            "lossy": self._lossy.told(),
            "retention": self._retention and self._retention.dump(),
            "delta": self._delta,
        }
        order = Order(
            number,
            begin,
            plan,
            on_staged=lambda: self._staged(pending),
            on_end=lambda outcome: self._ended(pending, number, outcome),
            on_warning=pending._warn,
            urgent=pending._urgent,
            stall=lambda: pending.stall,
            patient=self._delta != AUTO,
        )
        with pending._holding_up(start):
            try:
                self._attached(plan).submit(order)
                self._pending.append(pending)
            except RaystowError as error:
                self._ended(pending, number, error)
        record(STALL, SYSTEM.monotonic() - start, repository=self.uri, call="save")
        return pending

    def fence(self) -> None:
        """Return when every tensor given to ``save`` so far has been read, and may change.

        After ``timeout`` seconds the node worker does not take the data: the saves concerned fail, and nothing reads the tensors
        any more. Raises ``SaveFailed`` as ``save`` does; the tensors may change then, too.
        """
        start = SYSTEM.monotonic()
        waited = [p for p in self._pending if not p.staged(0)]
        for pending in waited:
            left = max(0.0, start + self._timeout - SYSTEM.monotonic())
            with pending._holding_up(start):
                if not pending.staged(left):
                    what = f"nothing staged within {self._timeout:.0f} s: the node worker takes no data"
                    self._conclude(pending, ClusterError(what, subject=f"save of step {pending.step}"))
                    self._detach(patience=0)
        if waited:
            record(STALL, SYSTEM.monotonic() - start, repository=self.uri, call="fence")
        self.failures.check()

    def guard(self, optimizer: Any) -> None:
        """Call ``fence`` before every ``step()`` of a torch optimizer."""
        optimizer.register_step_pre_hook(lambda *_: self.fence())

    def restore_latest(
        self,
        into: dict[str, Any],
        *,
        strict: bool = True,
        cast: bool = False,
        allow_uncommitted: bool = True,
        progress: Callable[[int], None] = lambda nbytes: None,
    ) -> Version | None:
        """Fill ``into`` from the newest version; that version, or None if there is none. See ``restore.restore``.

        From the memory of the nodes where that has it, else from the store. With ``allow_uncommitted``, also a save that is still
        being uploaded, or that could not be, if all of it is in memory. Every rank calls this. All of them restore the same
        version: if it is damaged for one, the error log says so and all take the one before. Raises ``Damaged`` if no version is
        whole, ``DeadlineExceeded`` if a rank is not heard of for ``timeout``.
        """
        self.fence()
        begun = SYSTEM.monotonic()
        number = next(self._restores)
        vote = Vote(*(self.rank, self.world_size, self._incarnation, number, self._timeout), allow_uncommitted=allow_uncommitted)
        # Not opened, which reads the marker: what is in memory can be restored while the store is down.
        repository = Repository(self._store, self._repository_id, trust=key_files.trust(), signed_by=self._signed_by)
        agreement = Together(repository, self._port, vote, self._node_worker, here=cluster.node_here())
        who = {"rank": self.rank, "world_size": self.world_size}
        version = restore_latest(repository, into, agreement, **who, strict=strict, cast=cast, progress=progress)
        if version is not None:
            record(RESTORE, SYSTEM.monotonic() - begun, repository=self.uri)
        return version

    def close(self) -> None:
        """Wait until the saves under way are durable or have failed, and let go of the node worker.

        Never raises for a failed save, and waits for none past its ``timeout``.
        """
        for pending in self._pending:
            self._await(pending)
        self._detach()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_for_room(self) -> None:
        self._pending = [p for p in self._pending if not p.done()]
        while len(self._pending) >= self._max_in_flight:
            oldest = self._pending[0]
            what = "%d saves are in flight: waiting for that of step %d"
            self._log.warning(what, len(self._pending), oldest.step, extra={"step": oldest.step})
            self._await(oldest)
            self._pending = self._pending[1:]

    def _await(self, pending: Pending) -> None:
        """Wait until a save has ended, but not past its own deadline: from then on it counts as failed."""
        left = pending.begun + self._timeout + _LATE - SYSTEM.monotonic()
        try:
            pending.result(max(0.0, left))
        except DeadlineExceeded:
            what = f"not durable after {self._timeout:.0f} s, and nobody says why; it may become a version yet"
            self._conclude(pending, DeadlineExceeded(what, subject=f"save of step {pending.step}"))
        except RaystowError:
            pass  # counted and logged when it was heard of

    def _conclude(self, pending: Pending, outcome: Version | RaystowError) -> None:
        if not pending._set_outcome(outcome):
            return
        if isinstance(outcome, RaystowError):
            self.failures.failed(pending.step, outcome)
        else:
            self.failures.succeeded()
            record(DURABLE, SYSTEM.monotonic() - pending.begun, repository=self.uri)

    def _staged(self, pending: Pending) -> None:
        if not pending.staged(0):
            record(STAGED, SYSTEM.monotonic() - pending.begun, repository=self.uri)
        pending._set_staged()

    def _count_failure(self) -> None:
        record(FAILED_SAVES, repository=self.uri)

    def _attached(self, plan: SavePlan) -> Staging:
        """The connection to this node's worker, made to measure for the first plan; a new one if the worker has died since."""
        if self._staging is not None and self._staging.lost:
            self._detach()
        if self._staging is None:
            memory = self._share(plan) if self._memory is None else self._memory
            coded = memory // 8 if plan.ready else memory // 2  # what a GPU has coded stays in the ring until it is uploaded
            hello = {
                "uri": self.uri,
                "repository": self._repository_id,
                "rank": self.rank,
                "world_size": self.world_size,
                "incarnation": self._incarnation,
                "pid": os.getpid(),
                "slot": slot_size(memory - coded, gpu=bool(plan.ready)),
                "ring": memory - coded,
                "coded": coded,
                "keep_in_memory": self._keep_in_memory,
                "replicas": self._replicas,
                "replica_rate": self._replica_rate,
            }
            if self._delta not in (0, AUTO) and plan.ready and (self._compress_in == "node" or self._codec == "ans"):
                why = 'compress_in="node"' if self._compress_in == "node" else 'codec="ans"'
                self._log.warning("with %s tensors on a GPU are stored whole, not as differences to an earlier version", why)
            self._staging = Staging(self._node_worker(), hello, codec=self._codec, compress_in=self._compress_in)
        return self._staging

    def _node_worker(self) -> str:
        """The address of this node's worker, started if there is none."""
        address: str = cluster.call(node_actor(RayPort).address.remote(), _START, "node worker")
        return address

    def _share(self, plan: SavePlan) -> int:
        """The memory to take where nobody has said."""
        gpus = max(1, cluster.gpus_here()) if plan.ready else 0
        return share_of_memory(plan.nbytes if plan.ready else 0, gpus=gpus, machine=memory_limit())

    def _detach(self, *, patience: float = 10.0) -> None:
        if self._staging is not None:
            self._staging.close(patience=patience)
            self._staging = None

    def _ended(self, pending: Pending, number: int, outcome: Entry | RaystowError) -> None:
        if isinstance(outcome, RaystowError):
            self._conclude(pending, outcome)
            # Beside whatever this thread does next: a coordinator that is frozen is waited for as long as an answer may take.
            telling = (pending.step, number, outcome)
            threading.Thread(target=self._tell_failed, args=telling, name="raystow-tell", daemon=True).start()
        else:
            self._conclude(pending, Version(self._store, outcome, self._repository_id))

    def _tell_failed(self, step: int, number: int, error: RaystowError) -> None:
        """Whatever the reason, other ranks must not wait for this one. The coordinator may know already."""
        try:
            self._port.save_failed(self.rank, self._incarnation, number, step, f"rank {self.rank}: {error.what}")
        except RaystowError as unheard:
            self._log.warning("the coordinator could not be told: %s", unheard, extra={"step": step})
