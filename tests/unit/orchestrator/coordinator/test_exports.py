"""Exports of a coordinator: which version is due, and what happens if one fails."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.builders import empty_record, memory_repository
from helpers.fake_clock import FakeClock
from helpers.local_cluster import LocalCluster
from helpers.replaced_parts import replace_parts

from raystow.orchestrator.coordinator.exports import RETRY, TRIES, Exports
from raystow.orchestrator.export.destination import Destination
from raystow.storage.commit.committer import Committer
from raystow.storage.format.root import Root
from raystow.storage.repository import Repository, open_repository
from raystow.storage.retention.export_rule import Export
from raystow.storage.runtime.metrics import FAILED_EXPORTS, Metric, record_with
from raystow.workers.protocol.messages import ExportOrder


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """A repository of two versions."""
    with LocalCluster(str(tmp_path / "run")) as cluster:
        for step in (1, 2):
            cluster.save({"model": {"w": torch.full((4, 4), float(step))}}, step=step)
    return open_repository(str(tmp_path / "run"))


def listed(versions: int) -> Root:
    """Return a root with so many versions."""
    repository = memory_repository()
    committer = Committer(repository, "test", None)
    for step in range(1, versions + 1):
        committer.commit(empty_record(committer, step))
    return repository.root()


def due(export: Export, root: Root, *, numbers: dict[int, float] | None = None, mode: str = "min") -> int | None:
    entry = export.due(root, numbers or {}, ("loss", mode, 1))
    return None if entry is None else entry.id


def test_a_failed_export_is_reported_and_tried_again(
    repository: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counted: list[Metric] = []
    record_with(lambda metric, value, tags: counted.append(metric))
    out, clock = tmp_path / "served", FakeClock()
    out.write_text("no folder")
    exports, order = Exports(repository, clock=clock), ExportOrder(Export(str(out)), {"config.json": b"{}"})
    place = f"{out}/version-00000002"
    exports.request(order, None)
    with caplog.at_level(logging.INFO):
        exports.run()
        assert f"an export to {place} failed, and is tried again" in caplog.text
        assert [*exports.failures] == [caplog.messages[-1]]
        assert repository.root().exports == {}
        assert [*repository.root().failed_exports] == [place]
        assert (exports.waiting, exports.due) == (True, False)
        out.unlink()
        clock.sleep(RETRY)
        assert exports.due
        exports.run()
    assert not exports.waiting
    assert (repository.root().exports, repository.root().failed_exports) == ({place: 2}, {})
    assert f"version 2 is exported to {place}" in caplog.text
    assert sorted(path.name for path in Path(place).iterdir()) == ["config.json", "model.safetensors"]
    elsewhere = {f"{out}-ema/version-00000002": "AccessDenied"}  # of another run's export
    before = {str(out): "a metric could not be read"}  # of an export that failed before its version was chosen
    repository.register.update(lambda root: replace(root, exports={}, failed_exports={**before, **elsewhere}))
    exports.request(ExportOrder(Export(f"{out}/")), None)
    exports.run()
    assert repository.root().failed_exports.keys() == {place, *elsewhere}
    out.rename(tmp_path / "away")
    exports.request(order, None)
    exports.run()
    assert (repository.root().exports, repository.root().failed_exports) == ({place: 2}, elsewhere)
    exports.request(order, None)
    exports.run()  # nothing is due
    assert repository.root().exports == {place: 2}
    record_with(None)
    assert counted.count(FAILED_EXPORTS) == 2


def test_an_export_is_not_tried_forever(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "served").write_text("no folder")
    clock = FakeClock()
    exports = Exports(repository, clock=clock)
    exports.request(ExportOrder(Export(str(tmp_path / "served"))), None)
    tries = 0
    while exports.waiting:
        clock.sleep(RETRY)
        if exports.due:
            exports.run()
            tries += 1
    assert tries == TRIES


def test_a_commit_during_an_export_is_not_forgotten(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exports, order = Exports(repository), ExportOrder(Export(str(tmp_path / "served")))
    exports.request(order, None)

    def fails(*_: object, **__: object) -> None:
        exports.request(order, None)  # the coordinator commits meanwhile
        raise OSError("full")

    replace_parts(monkeypatch, [(Destination, "parse", fails)])
    exports.run()
    assert exports.due


def test_every_nth_version_is_due() -> None:
    export, root = Export("out", 2), listed(3)
    assert due(export, listed(1)) is None
    assert due(export, root) == 3
    assert due(export, replace(root, exports={export.place(2): 2})) is None
    assert due(export, replace(listed(4), exports={export.place(2): 2})) == 4
    assert due(export, replace(root, exports={"elsewhere/version-00000003": 3})) == 3


def test_the_best_version_is_due_once() -> None:
    export, root = Export("out", "best"), listed(3)
    assert due(export, root) is None
    numbers = {1: 2.0, 2: 1.0, 3: 3.0}
    assert due(export, root, numbers=numbers) == 2
    assert due(export, root, numbers=numbers, mode="max") == 3
    assert due(export, replace(root, exports={export.place(2): 2}), numbers=numbers) is None


def test_a_pinned_version_is_due() -> None:
    export, root = Export("out", "pin:serve"), listed(3)
    assert due(export, root) is None
    assert due(export, replace(root, pins={"serve": 2})) == 2
    assert due(export, replace(root, pins={"serve": 2}, exports={export.place(2): 2})) is None
