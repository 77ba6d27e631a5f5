"""The message with which a rank connects to its node worker: who it is, and how much memory its saves may take."""

from __future__ import annotations

import os

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
        process="node" if compression.process == "node" else "training",
    )


def _default(plan: SavePlan) -> int:
    gpus = max(1, ray_cluster.gpus_here()) if plan.ready else 0
    return default_staging(plan.nbytes if plan.ready else 0, gpus=gpus, machine=memory_limit())
