"""Measure what reads the whole manifest of a large version: verification, ``show``, a copy, thinning, a comparison (with itself),
a plan for as many ranks, and one pass of an export. Each in its own process.

See ``synthetic_version``: packs have 16 bytes for each chunk, so the CPU is that of the manifest, without coding and digests of
tensors.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from control_plane_save import RANKS, TENSORS
from report import peak_memory
from synthetic_version import Replica, build, opened

from raystow.cli.version_comparison import differences
from raystow.orchestrator.restore.what_if import plan_world
from raystow.storage.checks.verify import verify_sizes
from raystow.storage.copies.transfer import copy_objects
from raystow.storage.format.selection import Sought
from raystow.storage.retention import rewrite
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.versions.stored_manifest import KEPT
from raystow.storage.versions.version import Version

OPERATIONS = "verify", "show", "cp", "thin", "diff", "plan", "pass"


def large_manifest(nodes: int, operations: Sequence[str] = OPERATIONS) -> dict[str, Any]:
    """Return the cost of each operation on a version of so many nodes."""
    context = multiprocessing.get_context("spawn")
    rows: dict[str, Any] = {"ranks": nodes * RANKS, "chunk rows": nodes * RANKS * TENSORS, "load before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        packs = build(Path(folder) / "source", nodes)
        for operation in operations:
            pipe, theirs = context.Pipe()
            process = context.Process(target=_measure, args=(theirs, operation, Path(folder), nodes, packs))
            process.start()
            theirs.close()
            rows[operation] = pipe.recv()
            process.join()
    return rows


def _measure(pipe: Connection, operation: str, folder: Path, nodes: int, packs: dict[str, list[int]]) -> None:
    repository, store = opened(folder / "source", nodes, packs)
    replica = Replica(folder / "replica", nodes, packs)
    version = repository.latest()
    assert version is not None
    if operation == "pass":
        _ = version.contents  # read before
    store.requests.clear()
    store.nbytes, before = 0, peak_memory()
    start, wall = time.process_time(), time.perf_counter()
    _operate(operation, version, replica)
    cpu, took = time.process_time() - start, time.perf_counter() - wall
    requests = {kind: store.requests[kind] + replica.requests[kind] for kind in sorted({*store.requests, *replica.requests})}
    pipe.send({"cpu": cpu, "wall": took, "grown": peak_memory() - before, "metadata": store.nbytes, "requests": requests})


def _operate(operation: str, version: Version, replica: Replica) -> None:
    if operation == "verify":
        verify_sizes(version)
    elif operation == "show":
        _ = version.contents
    elif operation == "cp":
        copy_objects(version, replica)
        verify_sizes(Version(replica, version.entry, version.repository_id))
    elif operation == "diff":
        differences(version, Version(version.store, version.entry, version.repository_id))
    elif operation == "plan":
        plan_world(version, version.world_size, per_node=RANKS)
    elif operation == "pass":
        names = list(version.contents.tensors)[: KEPT // version.world_size]
        version.rows({name: Sought(tensor=True) for name in names})
    else:
        rewrite.plan(version, None, weights_only=True, recode=False).execute(SYSTEM.token())
