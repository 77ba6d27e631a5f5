"""What a version and a repository can hold is checked when a save begins, and the estimates are not below what is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.builders import entry, memory_repository, overwrite_root, whole, write
from helpers.coordinated_run import coordinated_run
from helpers.local_cluster import LocalCluster

from raystow.orchestrator.coordinator.attempt import Phase
from raystow.state import planner
from raystow.state.planner import plan_save
from raystow.storage import limits
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import SaveFailed, StateError
from raystow.storage.format import capacity
from raystow.storage.format.root import Dropped, Root, Segment
from raystow.storage.format.version_record import FragmentInfo, VersionRecord
from raystow.storage.limits import MAX_DEPTH, MAX_DIGITS, MAX_FRAGMENT, MAX_ITEMS, MAX_NAME, MAX_RECORD, MAX_ROWS
from raystow.workers.packing import attempt

TOKEN = "f" * 16


def planned(state: Any) -> object:
    return plan_save(state, rank=0, world_size=1)


def inside(depth: int) -> object:
    """A value inside of so many lists."""
    found: object = 1
    for _ in range(depth):
        found = [found]
    return found


AT_BEGIN: dict[str, Callable[[], object]] = {
    "MAX_RECORD": lambda: capacity.check_record(1, 1, ["x" * (MAX_RECORD + 1)]),
    "MAX_ITEMS": lambda: capacity.check_record(1, MAX_ITEMS, ()),
    "MAX_ROOT": lambda: capacity.check_root(Root("r" * 32, versions=(entry(1),) * capacity.VERSIONS)),
    "MAX_NAME": lambda: planned({"w" * (MAX_NAME + 1): 1}),
    "MAX_DEPTH": lambda: planned({"w": inside(MAX_DEPTH)}),
    "MAX_DIGITS": lambda: planned({"w": 1 << 4 * MAX_DIGITS}),
}
"""What exceeds a bound, as early as the save begins."""

WHEN_RANKS_JOIN = {"MAX_ROWS", "MAX_TEXT"}
"""Bounds of a node: see ``test_a_node_with_too_many_rows_fails_when_a_rank_joins``."""

NEVER_EXCEEDED = {
    **dict.fromkeys(("MAX_FRAGMENT", "MAX_CELLS", "MAX_PAGES", "MAX_FOOTER"), "follow from the rows and their texts"),
    **dict.fromkeys(("MAX_CHUNK", "MAX_STORED_CHUNK"), "plans cut tensors into chunks of 16 MiB"),
    **dict.fromkeys(("MAX_TENSOR", "MAX_DIMENSIONS", "MAX_INTEGER", "MAX_TIME", "MAX_NUMBER"), "more than torch or time has"),
    **dict.fromkeys(("MAX_DIFFERENCES", "MAX_SIDE"), "the coordinator lists no more"),
    "MAX_PARTS": "a Checkpointer takes no more names",
    "MAX_CHAIN": "retention and saves plan no longer chains",
    **dict.fromkeys(("MAX_MARKER", "MAX_SIGNATURE"), "of fixed content"),
    **dict.fromkeys(("MAX_SEGMENT", "MAX_SEGMENTS"), "of the step journal, not of a save"),
}


def test_each_bound_is_checked_early_or_never_exceeded() -> None:
    assert {name for name in vars(limits) if name.startswith("MAX_")} == AT_BEGIN.keys() | WHEN_RANKS_JOIN | NEVER_EXCEEDED.keys()


@pytest.mark.parametrize("bound", AT_BEGIN)
def test_a_save_above_a_bound_is_refused_with_a_remedy(bound: str) -> None:
    with pytest.raises((SaveFailed, StateError)) as raised:
        AT_BEGIN[bound]()
    assert raised.value.remedy


def test_a_record_is_not_larger_than_its_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, ranks = 300, 8
    one = FragmentInfo(10**6, MAX_FRAGMENT, "ab" * 32, (), MAX_ROWS, 1 << 50, 1 << 49, 1 / 3, packs=10**6)
    infos = [replace(one, ranks=tuple(range(10**7, 10**7 + ranks))) for _ in range(nodes)]
    record = VersionRecord("r" * 32, 10**9, TOKEN, 1, 1, 1.5, nodes * ranks, fragments=tuple(infos), packs=None)
    alone = len(replace(record, fragments=()).dump())
    monkeypatch.setattr(capacity, "MAX_RECORD", len(record.dump()) - alone - 1)
    with pytest.raises(SaveFailed, match="300 nodes"):
        capacity.check_record(nodes, nodes * ranks, ())
    capacity.check_record(nodes // 2, nodes * ranks // 2, ())


def test_a_root_is_not_larger_than_its_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    at, numbers = 1.79e9 + 1 / 3, range(10**6, 10**6 + 400)
    entries = tuple(replace(entry(id, id, at, 1 << 50), digest="ab" * 32, size=10**7) for id in numbers)
    dropped = tuple(Dropped(id, TOKEN, at) for id in numbers)
    segments = tuple(Segment(number, TOKEN, "ab" * 32, 10**6, number, TOKEN, at, 10**12) for number in numbers)
    root = Root("r" * 32, next_id=10**7, versions=entries, dropped=dropped, segments=segments, next_segment=10**7)
    monkeypatch.setattr(capacity, "MAX_ROOT", len(root.dump()) - len(Root("r" * 32).dump()) - 1)
    with pytest.raises(SaveFailed, match="400 versions"):
        capacity.check_root(root)


def test_a_full_repository_begins_no_save(monkeypatch: pytest.MonkeyPatch) -> None:
    repository = memory_repository()
    write(Committer(repository, "me"), {"w": whole(np.ones(3))})
    overwrite_root(repository, lambda root: replace(root, versions=tuple(entry(id) for id in range(1, 9)), next_id=9))
    monkeypatch.setattr(capacity, "MAX_ROOT", 8 * 256)
    with pytest.raises(SaveFailed, match="retention=") as raised:
        Committer(repository, "me").reserve()
    assert "8 versions" in raised.value.what


def test_a_save_of_too_many_nodes_ends_when_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "MAX_RECORD", 400)
    run = coordinated_run()
    ticket = run.begin(0)
    assert run.phase(ticket) is Phase.GATHERING
    with pytest.raises(SaveFailed, match="2 ranks on 2 nodes"):
        run.core.attempt(run.begin(1)).result()
    assert run.phase(ticket) is Phase.ABORTED


def test_a_save_of_too_many_tensors_ends_when_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster("memory://too-many") as cluster:
        state = {f"w{i}": np.ones(4) for i in range(9)}
        monkeypatch.setattr(planner, "MAX_ROWS", 8)
        with pytest.raises(StateError, match="9 tensors and plain values"):
            cluster.save(state, step=1)
        monkeypatch.undo()
        monkeypatch.setattr(attempt, "MAX_ROWS", 8)
        with pytest.raises(SaveFailed, match="this node has more than 8 chunks"):
            cluster.save(state, step=1)
        monkeypatch.undo()
        assert cluster.save(state, step=2).id == 2
