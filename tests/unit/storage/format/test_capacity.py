"""What a version and a repository can hold is checked when a save begins, and the estimates are not below what is written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.builders import entry, memory_repository, overwrite_root, whole, write
from helpers.coordinated_run import coordinated_run
from helpers.local_cluster import LocalCluster

from raystow.orchestrator.coordinator.attempt import Phase
from raystow.state import planner
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import SaveFailed, StateError
from raystow.storage.format import capacity
from raystow.storage.format.root import Dropped, Root, Segment
from raystow.storage.format.version_record import FragmentInfo, VersionRecord
from raystow.storage.limits import MAX_FRAGMENT, MAX_ROWS
from raystow.workers.packing import attempt

TOKEN = "f" * 16


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
