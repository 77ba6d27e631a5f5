"""The message with which a rank connects to its node worker: who it is, and how much memory its saves may take."""

from __future__ import annotations

import os
from typing import Literal

from ...workers.cache.host_memory import memory_limit
from ...workers.protocol.messages import JoinRun, OpenSession
from ...workers.shm.ring import slot_size
from .. import ray_cluster
from ..save.planner import SavePlan
from .options import Compression, Memory, Replication, default_staging


def open_session(
    uri: str, repository: str, member: JoinRun, plan: SavePlan, options: tuple[Memory, Compression, Replication]
) -> OpenSession:
    """The message for a rank whose first save is ``plan``, which the memory is sized for by default."""
    memory, compression, replication = options
    staging = memory.staging or _default(plan)
    coded = staging // 8 if plan.ready else staging // 2  # what a GPU has coded stays in the ring until it is uploaded
    process: Literal["training", "node"] = "node" if compression.process == "node" else "training"
    return OpenSession(
        uri=uri,
        repository=repository,
        rank=member.rank,
        world_size=member.world_size,
        incarnation=member.incarnation,
        pid=os.getpid(),
        ring=staging - coded,
        slot=slot_size(staging - coded, gpu=bool(plan.ready)),
        coded=coded,
        cache=memory.cache,
        replicas=replication.replicas,
        replication_rate=replication.rate,
        process=process,
        keep=_kept_in_ring(plan, memory.cache) if process == "training" else 0,
    )


def _default(plan: SavePlan) -> int:
    return default_staging(plan.nbytes if plan.ready else 0, gpus=_gpus(plan), machine=memory_limit())


def _kept_in_ring(plan: SavePlan, cache: int | None) -> int:
    """Bytes for two coded versions, the newest and the next, if the rank's share of the node's memory for versions allows."""
    wanted = plan.nbytes * 3 // 2 if plan.ready else 0
    return wanted if wanted <= (memory_limit() // 4 if cache is None else cache) // max(1, _gpus(plan)) else 0


def _gpus(plan: SavePlan) -> int:
    return max(1, ray_cluster.gpus_here()) if plan.ready else 0
