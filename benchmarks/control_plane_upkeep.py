"""Measure the housekeeping of a version of 8,192 nodes: retention, collection, and its share of a verification.

The store is in memory, so CPU and memory are those of raystow; its requests are counted as an S3 server gets them: 1,000 keys to
a page of a listing or to a deletion. A verification is measured on one node's fragment.
"""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from typing import Any

from control_plane_save import RANKS, TENSORS, fragment

from raystow.storage.commit.committer import Committer
from raystow.storage.format import keys
from raystow.storage.format.manifest import Fragment
from raystow.storage.format.pack_sizes import pack_sizes
from raystow.storage.format.version_record import FragmentInfo, VersionRecord
from raystow.storage.repository import create_repository
from raystow.storage.retention.policy import Policy
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores.memory import MemoryStore

KEYS = 1000
"""Keys of one request."""


def upkeep(nodes: int, packs: int) -> dict[str, Any]:
    """Drop and collect a version of so many nodes with so many packs each."""
    repository = create_repository(f"memory://upkeep-{SYSTEM.token()}")
    committer, store = Committer(repository, "benchmark"), repository.store
    assert isinstance(store, MemoryStore)
    for step in range(2):
        id, attempt = committer.reserve()
        infos = tuple(
            FragmentInfo(node, 363_000, "5e" * 32, tuple(range(RANKS * node, RANKS * node + RANKS)), packs, 0, 0, packs=packs)
            for node in range(nodes if step == 0 else 1)
        )
        record = VersionRecord(repository.id, id, attempt, committer.epoch, step, SYSTEM.now(), nodes * RANKS, packs=None)
        if step == 0:
            for node in range(nodes):
                store.put(keys.fragment(id, attempt, node), [b"."])
                for number in range(packs):
                    store.put(keys.pack(id, attempt, node, "optimizer", number), [b"."])
        committer.commit(replace(record, fragments=infos))
    before, start = _peak(), time.process_time()
    repository.plan_retention(Policy(keep_last=1)).execute()
    retained = time.process_time()
    plan = repository.plan_collection(grace=0, dropped_only=True)
    planned = time.process_time()
    batches = list[int]()
    done = plan.execute(batches.append)
    pages = -(-done.objects // KEYS)
    return {
        "objects": done.objects,
        "retention cpu": retained - start,
        "plan cpu": planned - retained,
        "collection cpu": time.process_time() - planned,
        "grown": _peak() - before,
        "listing requests": 2 * pages + 1,
        "deletion requests": len(batches),
    }


def verification(nodes: int) -> dict[str, Any]:
    """Read one node's fragment: its packs alone, as a repair does, and all rows, as a verification does."""
    made, _ = fragment(0, nodes)
    data = made.dump()
    key = keys.fragment(1, "0" * 16, 0)
    start = time.process_time()
    sizes = pack_sizes(data, key)
    listed, before = time.process_time(), _resident()
    rows = Fragment.load(data, 0, key)
    return {
        "rows": len(rows.chunks),
        "packs": len(sizes),
        "packs cpu": listed - start,
        "rows cpu": time.process_time() - listed,
        "rows memory": _resident() - before,
        "tensors": TENSORS,
    }


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
