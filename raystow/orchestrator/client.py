"""``Checkpointer``: what a training process holds."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable
from typing import Any

from ..storage import values
from ..storage.clock import SYSTEM
from ..storage.errors import ClusterError, RaystowError, StateError
from ..storage.repository import open_repository
from ..storage.root import Entry
from ..storage.stores import open_store
from ..storage.version import Version
from ..workers.node_actor import node_actor
from ..workers.ring import SLOT, slot_size
from ..workers.staging import CODECS, PLACES, Order, Staging
from . import cluster
from .codec import usable_codec
from .coordinator_actor import RayPort, coordinator_actor
from .memory import machine_memory, share_of_memory
from .pending import Pending
from .placement import placement
from .planner import SavePlan, plan_save
from .restore import restore_latest

logger = logging.getLogger(__name__)

_START = 120.0  # seconds that an actor may take to start


class Checkpointer:
    """Saves and restores the state of one rank. Make one in each training process; they need not be made at the same time.

    ``uri``: the repository, made when it does not exist. ``rank`` and ``world_size`` come from Ray Train or torch.distributed
    where those are in use. ``memory``: bytes of host memory that saving may take for this rank, staged and coded together; by
    default 1 GiB, and for a state on GPUs what it takes to hold one save of it, if that is no more than this rank's part of half
    the machine's memory. ``codec``: what tensors on a GPU are coded with; see ``docs/gpu.md``. ``compress_in``: the
    process that codes them, "training" (this one: costs the training least) or "node" (the node worker's: this one only copies
    them, into 256 MiB of device memory that both share).
    ``timeout``: seconds after which a save that is not durable is given up, and the longest that ``fence`` waits.
    ``max_in_flight``: saves that may be under way; one more makes ``save`` wait for the oldest.
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
        timeout: float = 600.0,
        max_in_flight: int = 2,
    ) -> None:
        cluster.connect()
        found_rank, found_world = placement()
        self.rank, self.world_size = found_rank if rank is None else rank, found_world if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise StateError(f"rank {self.rank} of {self.world_size} cannot be", remedy="pass both rank= and world_size=")
        if (memory is not None and memory < 8 * SLOT) or max_in_flight < 1:
            raise StateError(f"memory must be at least {8 * SLOT >> 20} MiB and max_in_flight at least 1")
        if codec not in CODECS:
            raise StateError(f"codec {codec!r} is none of {', '.join(CODECS)}")
        if compress_in not in PLACES:
            raise StateError(f"compress_in {compress_in!r} is none of {', '.join(PLACES)}")
        self._store = open_store(os.fspath(uri))
        self.uri = self._store.uri
        self._memory, self._codec, self._timeout, self._max_in_flight = memory, usable_codec(codec), timeout, max_in_flight
        self._compress_in = compress_in
        self._incarnation = SYSTEM.token()
        self._saves = itertools.count(1)
        self._pending: list[Pending] = []
        self._staging: Staging | None = None
        self._repository_id = cluster.call(coordinator_actor(self.uri).start.remote(), _START, f"coordinator of {self.uri}")
        self._port = RayPort(self.uri)
        node_actor(RayPort)  # starts while the caller goes on, and is ready when the first save attaches
        self._port.join(self.rank, self._incarnation)

    def save(self, state: dict[str, Any], *, step: int, metrics: dict[str, Any] | None = None) -> Pending:
        """Begin to save ``state`` as of ``step`` (not negative); every rank calls this for the same steps in the same order.

        Returns when the state is checked and planned: tensors are staged in the background, and may change after ``fence``.
        Plain tensors and arrays are taken to be the same on every rank and stored once; DTensors say what they are; plain
        values are kept for each rank. ``metrics`` (plain values) of all ranks are merged into the version's.

        Raises ``StateError`` with the path of what cannot be stored, before a byte is written. A save that fails later does not
        raise here or in ``fence``; its ``Pending.result()`` does, and a warning is logged.
        """
        start = SYSTEM.monotonic()
        metrics = dict(metrics or {})
        bad = [name for name, value in metrics.items() if not isinstance(name, str) or not values.is_plain(value)]
        if bad or type(step) is not int or step < 0:
            raise StateError(f"step {step!r}, metrics {bad}: a step is an integer >= 0, metrics are plain values by name")
        plan = plan_save(state, rank=self.rank, world_size=self.world_size, on_gpu=self._codec != "cpu")
        self._wait_for_room()
        pending = Pending(step)
        number = next(self._saves)
        begin = {
            "save": number,
            "step": step,
            "timeout": self._timeout,
            "metrics": {name: values.encode(value) for name, value in metrics.items()},
            "values": plan.values,
        }
        order = Order(
            number,
            begin,
            plan,
            on_staged=pending._set_staged,
            on_end=lambda outcome: self._ended(pending, outcome),
            on_warning=pending._warn,
            urgent=pending._urgent.is_set,
        )
        try:
            self._attached(plan).submit(order)
            self._pending.append(pending)
        except RaystowError as error:
            pending._set_outcome(error)
        pending.stall += SYSTEM.monotonic() - start
        return pending

    def fence(self) -> None:
        """Return when every tensor given to ``save`` so far has been read, and may change.

        ``ClusterError`` after ``timeout`` seconds: the node worker does not take the data. The saves concerned are given up
        then, and nothing reads the tensors any more.
        """
        start = SYSTEM.monotonic()
        for pending in [p for p in self._pending if not p.staged(0)]:
            pending._urgent.set()
            left = max(0.0, start + self._timeout - SYSTEM.monotonic())
            if not pending.staged(left):
                self._detach(patience=0)
                raise ClusterError(f"nothing staged within {self._timeout:.0f} s", subject=f"save of step {pending.step}")
            pending.stall += SYSTEM.monotonic() - start

    def guard(self, optimizer: Any) -> None:
        """Call ``fence`` before every ``step()`` of a torch optimizer."""
        optimizer.register_step_pre_hook(lambda *_: self.fence())

    def restore_latest(
        self, into: dict[str, Any], *, strict: bool = True, progress: Callable[[int], None] = lambda nbytes: None
    ) -> Version | None:
        """Fill ``into`` from the newest committed version; that version, or None if there is none. See ``restore.restore``."""
        self.fence()
        return restore_latest(open_repository(self.uri), into, rank=self.rank, strict=strict, progress=progress)

    def close(self) -> None:
        """Wait until the saves under way are durable or have failed, and let go of the node worker."""
        for pending in self._pending:
            try:
                pending.result(self._timeout)
            except RaystowError as error:
                logger.warning("closing: %s", error)
        self._detach()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_for_room(self) -> None:
        self._pending = [p for p in self._pending if not p.done()]
        while len(self._pending) >= self._max_in_flight:
            oldest = self._pending[0]
            logger.warning("%d saves are in flight: waiting for that of step %d", len(self._pending), oldest.step)
            try:
                oldest.result(self._timeout)
            except RaystowError:
                pass  # its own result tells
            self._pending = self._pending[1:]

    def _attached(self, plan: SavePlan) -> Staging:
        """The connection to this node's worker, made to measure for the first plan; a new one if the worker has died since."""
        if self._staging is not None and self._staging.lost:
            self._detach()
        if self._staging is None:
            worker = node_actor(RayPort)
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
            }
            address = cluster.call(worker.address.remote(), _START, "node worker")
            self._staging = Staging(address, hello, codec=self._codec, compress_in=self._compress_in)
        return self._staging

    def _share(self, plan: SavePlan) -> int:
        """The memory to take where nobody has said."""
        gpus = max(1, cluster.gpus_here()) if plan.ready else 0
        return share_of_memory(plan.nbytes if plan.ready else 0, gpus=gpus, machine=machine_memory())

    def _detach(self, *, patience: float = 10.0) -> None:
        if self._staging is not None:
            self._staging.close(patience=patience)
            self._staging = None

    def _ended(self, pending: Pending, outcome: Entry | RaystowError) -> None:
        if isinstance(outcome, RaystowError):
            if self._staging is not None and self._staging.lost:
                self._tell_lost(outcome)
            pending._set_outcome(outcome)
        else:
            pending._set_outcome(Version(self._store, outcome, self._repository_id))

    def _tell_lost(self, error: RaystowError) -> None:
        try:
            self._port.rank_lost(self.rank, self._incarnation, f"rank {self.rank}: {error.what}")
        except RaystowError as unheard:
            logger.warning("the coordinator could not be told: %s", unheard)
