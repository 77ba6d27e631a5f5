"""Makes the ``Checkpointer`` that fits how this process was launched."""

from __future__ import annotations

import os
import sys
from typing import Any

from ...orchestrator import ray_cluster
from ...orchestrator.client.checkpointer import Checkpointer
from ...orchestrator.client.rank_discovery import placement, train_worker
from ...storage.errors import StateError


def start(uri: str | os.PathLike[str] | None, options: dict[str, Any]) -> Checkpointer:
    """Return a ``Checkpointer``, that of Ray Train in one of its workers. A process that is alone starts a Ray cluster on this
    machine if there is none."""
    if train_worker() is not None:
        from ..ray_train.checkpointer import Checkpointer as TrainCheckpointer

        return TrainCheckpointer(uri, **options)
    if uri is None:
        raise StateError("no repository is named", subject="uri", remedy="pass uri=; only Ray Train knows a place for versions")
    _, world_size = placement(options.get("rank"), options.get("world_size"))
    address = os.environ.get("RAY_ADDRESS", "")
    if world_size == 1 and address in ("", "local") and not ray_cluster.is_here():
        ray_cluster.start_here()
        say(f"started a Ray cluster on this machine, which ends with process {os.getpid()}")
    return Checkpointer(uri, **options)


def say(text: str) -> None:
    """Print one line for the person who runs the training."""
    sys.stdout.write(f"raystow: {text}\n")
    sys.stdout.flush()
