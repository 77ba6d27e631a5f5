"""A rank's connection to its node worker, made for the first save or before it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from ...state.planner import SavePlan
from ...storage.errors import StateError
from ...storage.runtime import background
from ...storage.stores.settings import place_of
from ...workers.cache.host_memory import memory_limit
from ...workers.protocol.messages import OpenSession
from ...workers.shm.ring import one_version, slot_size
from ...workers.staging.client import Staging
from .. import ray_cluster
from .options import Compression, Memory, Replication, default_staging
from .startup import Startup

logger = logging.getLogger(__name__)


class NodeConnection:
    """Connects on demand, again if the node worker has died. Methods may be called on any thread.

    Args:
        startup: The rank, and its coordinator.
        options: The rank's options.
        codec: The codec of tensors on a GPU.
    """

    def __init__(self, startup: Startup, options: tuple[Memory, Compression, Replication], *, codec: str) -> None:
        self._startup, self._codec = startup, codec
        self._memory, self._compression, self._replication = options
        self._staging: Staging | None = None
        self._closed = False
        self._lock = threading.RLock()

    @property
    def made(self) -> bool:
        """Whether a connection was made."""
        return self._staging is not None

    def staging(self, plan: SavePlan) -> Staging:
        """Return the connection, whose memory is sized for the first plan."""
        with self._lock:
            if self._closed:
                raise StateError("this Checkpointer is closed", subject=self._startup.uri)
            if self._staging is not None and self._staging.lost:
                self.reset()
            if self._staging is None:
                opening = self._opening(plan)
                self._staging = Staging(
                    self._startup.node_address(), opening, codec=self._codec, raw=self._compression.may_be_raw
                )
            return self._staging

    def prepare(self, plan: Callable[[], SavePlan | None]) -> None:
        """Connect and prepare saves like this plan, if there is one, in the background. A failure is logged."""
        background.start("raystow-prepare", self._prepare, plan)

    def reset(self, *, patience: float = 10.0, why: str = "") -> None:
        """Disconnect; the next save connects again. Saves that are not staged within ``patience`` seconds fail. ``why``: reported
        by them."""
        with self._lock:
            staging, self._staging = self._staging, None  # not used again, also if it cannot be closed
            if staging is not None:
                staging.close(patience=patience, why=why)

    def give_up(self, why: str) -> None:
        """Disconnect, and end all saves, except for those of which the node worker has everything by now."""
        self.reset(patience=0, why=why)

    def close(self) -> None:
        """Disconnect for good."""
        with self._lock:
            self._closed = True
            self.reset()

    def _prepare(self, make: Callable[[], SavePlan | None]) -> None:
        try:
            if (plan := make()) is not None:
                self.staging(plan).prepare(plan)
        except Exception as error:  # the state may be invalid, or change while it is read: the first save raises what is wrong
            if not self._closed:
                logger.warning("the first save is not prepared, and will take longer: %s", error)

    def _opening(self, plan: SavePlan) -> OpenSession:
        """The first message: who the rank is, and how much memory its saves may take."""
        member, in_training, machine = self._startup.member, self._compression.process == "training", memory_limit()
        in_ring = (
            bool(plan.ready) or self._compression.may_be_raw
        )  # what is not coded by the node stays there until it is uploaded
        ranks = max(1, ray_cluster.gpus_here(self._startup.connection)) if plan.ready else member.world_size
        left = max(0, machine - ranks * plan.on_host)
        staging = self._memory.staging or default_staging(plan.nbytes if in_ring else 0, ranks=ranks, machine=left)
        coded = staging // 8 if in_ring else staging // 2
        # If the rank's share of the node's memory for versions allows.
        keep = one_version(plan.nbytes) if plan.ready and in_training else 0
        cache = machine // 4 if self._memory.cache is None else self._memory.cache
        return OpenSession(
            uri=self._startup.uri,
            repository=self._startup.wait().repository,
            rank=member.rank,
            world_size=member.world_size,
            incarnation=member.incarnation,
            pid=os.getpid(),
            ring=staging - coded,
            slot=slot_size(staging - coded, gpu=bool(plan.ready)),
            coded=coded,
            cache=self._memory.cache,
            replicas=self._replication.replicas,
            replication_rate=self._replication.rate,
            process="training" if in_training else "node",
            keep=keep if keep <= cache // ranks else 0,
            place=place_of(self._startup.store),
            part=member.part,
        )
