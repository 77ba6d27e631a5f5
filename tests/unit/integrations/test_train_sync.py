"""Ray Train and a repository keep the same versions after any loss between them, and pointers lead to these versions."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.fs
import pytest
from helpers.builders import empty_record, live_ids, whole
from helpers.builders import write as write_version
from helpers.polling import wait_until
from helpers.replaced_parts import replace_parts

import raystow
from raystow import Policy, ray_train
from raystow.integrations.ray_train.pointer import FILE, Identity, folder, identity, read, write
from raystow.integrations.ray_train.storage import repository_in, store_in
from raystow.integrations.ray_train.train_sync import TrainSync
from raystow.orchestrator.client.failures import Failures
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Damaged, NotFound, OutcomeUnknown, RaystowError, SaveFailed, StateError, StoreUnavailable
from raystow.storage.format.root import Entry
from raystow.storage.repository import Repository, create_repository
from raystow.storage.stores.settings import settings_of


@dataclass
class Pointer:
    """The path and the filesystem of a Ray Train checkpoint."""

    path: str
    filesystem: Any


class Train:
    """A run as Ray Train manages it: the checkpoints that it lists, newest last, and those that it deletes."""

    def __init__(self, place: Path) -> None:
        self.place, self.filesystem = place, pyarrow.fs.LocalFileSystem()
        self.names: list[str] = []

    def listed(self, patience: float = 0.0) -> set[Identity]:
        return {which for name in self.names if (which := identity(name)) is not None}

    def take_reports_of(self, sync: TrainSync) -> list[dict[str, Any]]:
        news = sync.take_reports()
        for name, _ in news:
            assert name not in self.names, "reported twice"
            assert (self.place / name / FILE).is_file()
            self.names.append(name)
        return [metrics for _, metrics in news]

    def drop(self, *ids: int) -> None:
        for name in list(self.names):
            if identity(name)[0] in ids:  # type: ignore[index]
                self.filesystem.delete_dir(str(self.place / name))
                self.names.remove(name)

    def checkpoint(self, entry: Entry) -> Pointer:
        return Pointer(str(self.place / folder(entry)), self.filesystem)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return create_repository(str(tmp_path / "repository"))


@pytest.fixture
def train(tmp_path: Path) -> Train:
    return Train(tmp_path / "train")


@pytest.fixture
def commit(repository: Repository) -> Callable[..., Entry]:
    committer = Committer(repository, "me")

    def commit(step: int, **metrics: Any) -> Entry:
        return committer.commit(replace(empty_record(committer, step), metrics=metrics)).entry

    return commit


def new_process(repository: Repository, train: Train, run: str = "run") -> TrainSync:
    def point(entry: Entry) -> None:
        write(repository, entry, train.filesystem, str(train.place / folder(entry)))

    sync = TrainSync(repository, run, listed=train.listed, write_pointer=point)
    sync.collect()
    return sync


def test_each_version_is_reported_to_train_once_and_in_order(repository: Repository, train: Train, commit: Any) -> None:
    sync = new_process(repository, train)
    commit(1, loss=3.0)
    sync.collect()
    sync.collect()
    commit(2, loss=2.0, raw=b"\x00")
    commit(3)
    sync.collect()
    assert train.take_reports_of(sync) == [{"loss": 3.0}, {"loss": 2.0}, {}]  # JSON cannot represent bytes
    assert train.take_reports_of(sync) == []
    assert train.listed() == {(v.id, v.attempt) for v in repository.versions()}


def test_only_versions_dropped_by_train_are_dropped(repository: Repository, train: Train, commit: Any) -> None:
    sync = new_process(repository, train)
    for step in (1, 2, 3, 4):
        commit(step)
    repository.pin(repository.version(2), "best")
    sync.collect()
    train.take_reports_of(sync)
    sync.drop()
    assert live_ids(repository) == [1, 2, 3, 4]
    train.drop(1, 2)
    commit(5)
    sync.drop()  # version 5 has not been reported to Train yet
    assert live_ids(repository) == [2, 3, 4, 5]
    repository.unpin("best")
    sync.drop()
    assert live_ids(repository) == [3, 4, 5]
    assert set(repository.root().pins.values()) == {3, 4}


def test_a_rolled_back_version_stays_while_train_lists_it(repository: Repository, train: Train) -> None:
    """Its pointer still leads to it, and it is dropped when Train drops it."""
    sync, committer = new_process(repository, train), Committer(repository, "me")

    def commit(*steps: int) -> list[Entry]:
        committer.notice(repository.root())
        return [committer.commit(empty_record(committer, step)).entry for step in steps]

    *_, third = commit(1, 2, 3)
    sync.collect()
    train.take_reports_of(sync)
    repository.rollback(1)
    assert ray_train.version_of(train.checkpoint(third)).entry == third
    repository.plan_retention(Policy(keep_last=1)).execute()
    commit(4)
    sync.collect()
    assert [version.id for version in repository.rolled_back()] == [2, 3]
    train.take_reports_of(sync)
    train.drop(2)
    sync.drop()
    assert (live_ids(repository), [version.id for version in repository.rolled_back()]) == ([1, 4], [3])


def test_retention_keeps_the_versions_that_train_lists(repository: Repository, train: Train, commit: Any) -> None:
    sync = new_process(repository, train)
    for step in (1, 2, 3):
        commit(step)
    sync.collect()
    repository.plan_retention(Policy(keep_last=1)).execute()
    assert live_ids(repository) == [1, 2, 3]


def test_lost_pins_are_created_again(repository: Repository, train: Train, commit: Any) -> None:
    sync = new_process(repository, train)
    for step in (1, 2):
        commit(step)
    sync.collect()
    train.take_reports_of(sync)
    for name in repository.root().pins:
        repository.unpin(name)
    sync = new_process(repository, train)
    assert set(repository.root().pins.values()) == {1, 2}
    train.drop(1)
    sync.drop()
    assert live_ids(repository) == [2]


def test_a_new_process_reports_the_unreported_versions(repository: Repository, train: Train, commit: Any) -> None:
    sync = new_process(repository, train)
    commit(1)
    sync.collect()
    train.take_reports_of(sync)
    commit(2)
    sync.collect()  # and the process ends: version 2 is never reported to Train
    commit(3)
    sync = new_process(repository, train)
    assert len(train.take_reports_of(sync)) == 2
    train.drop(1)
    sync = new_process(repository, train)
    sync.drop()
    assert train.take_reports_of(sync) == []
    assert live_ids(repository) == [2, 3]


def test_a_new_process_reports_all_versions_if_none_was(repository: Repository, train: Train, commit: Any) -> None:
    sync = new_process(repository, train)
    commit(1)
    sync.collect()
    commit(2)
    assert len(train.take_reports_of(new_process(repository, train))) == 2


def test_a_run_does_not_drop_versions_of_another_run(repository: Repository, train: Train, commit: Any) -> None:
    first = new_process(repository, train, "first")
    for step in (1, 2):
        commit(step)
    first.collect()
    train.take_reports_of(first)
    other = Train(train.place.parent / "other")
    second = new_process(repository, other, "second")
    assert len(other.take_reports_of(second)) == 1  # the version from which the second run continues
    commit(3)
    second.collect()
    other.take_reports_of(second)
    other.drop(2)
    second.drop()
    assert live_ids(repository) == [1, 2, 3]  # the first run's Train lists 2
    train.drop(1)
    first.drop()
    assert live_ids(repository) == [2, 3]


def test_a_failed_report_is_retried(
    repository: Repository, train: Train, commit: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = threading.Event()
    full.set()

    def write_pointer(entry: Entry) -> None:
        if full.is_set():
            raise OSError("no space left")
        write(repository, entry, train.filesystem, str(train.place / folder(entry)))

    sync = TrainSync(repository, "run", listed=train.listed, write_pointer=write_pointer)
    sync.collect()
    commit(1)
    with caplog.at_level(logging.WARNING):
        sync.collect()
    assert "no space left" in caplog.text
    assert train.take_reports_of(sync) == []
    full.clear()
    with monkeypatch.context() as patch:
        patch.setattr(repository, "root", lambda: (_ for _ in ()).throw(StoreUnavailable("down")))
        sync.collect()
        sync.drop()
        assert train.take_reports_of(sync) == []
    sync.collect()
    assert len(train.take_reports_of(sync)) == 1


def test_a_version_dropped_before_its_report_is_skipped(repository: Repository, train: Train, commit: Any) -> None:
    sync = new_process(repository, train)
    first, _ = commit(1), commit(2)
    root = repository.root()
    repository.plan_retention(Policy(keep_last=1)).execute()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repository, "root", lambda: root)  # the root as it was before retention
        sync.collect()
    train.take_reports_of(sync)
    assert folder(first) not in train.names
    assert len(train.names) == 1


def test_the_thread_reports_and_drops_versions(repository: Repository, train: Train, commit: Any) -> None:
    sync = new_process(repository, train)
    for step in (1, 2):
        commit(step)
    sync.wake()

    def both_reported() -> bool:
        train.take_reports_of(sync)
        return len(train.names) >= 2

    wait_until(both_reported, "both versions are reported", pause=0.01)
    train.drop(1)
    sync.wake()
    wait_until(lambda: live_ids(repository) == [2], "version 1 is dropped", pause=0.01)
    sync.close()


# Pointers


def test_a_compacted_version_keeps_its_identity(repository: Repository, train: Train) -> None:
    committer, sync = Committer(repository, "me"), new_process(repository, train)
    words = np.random.default_rng(0).integers(0, 1 << 30, (1, 20000), np.int32)
    for i in range(4):
        write_version(committer, {"w": whole(words + i)}, base=(1, {"w": words}) if i else None)
    sync.collect()
    train.take_reports_of(sync)
    second = repository.version(2).entry
    (anew,) = repository.plan_compaction([2]).execute()
    assert (anew.attempt != second.attempt, anew.origin) == (True, second.attempt)
    sync.drop()
    assert live_ids(repository) == [1, 2, 3, 4]
    assert ray_train.version_of(train.checkpoint(second)).entry == anew
    assert train.take_reports_of(new_process(repository, train)) == []


def test_a_pointer_leads_to_its_version(repository: Repository, train: Train, commit: Any, tmp_path: Path) -> None:
    sync = new_process(repository, train)
    first, second = commit(1), commit(2)
    sync.collect()
    train.take_reports_of(sync)
    pointer = train.checkpoint(second)
    assert ray_train.version_of(pointer).entry == second
    assert ray_train.restore(pointer, into={}).step == 2
    with pytest.raises(NotFound, match=r"dropped by Ray Train"):
        ray_train.version_of(train.checkpoint(replace(first, id=99)))
    (tmp_path / "repository").rename(tmp_path / "moved")
    assert ray_train.version_of(pointer, uri=tmp_path / "moved").entry == second


def test_a_pointer_to_a_dropped_version_raises_not_found(
    repository: Repository, train: Train, commit: Any, tmp_path: Path
) -> None:
    first, _ = commit(1), commit(2)
    write(repository, first, train.filesystem, str(train.place / folder(first)))
    repository.plan_retention(Policy(keep_last=1)).execute()
    with pytest.raises(NotFound, match=r"version 1 \(step 1\) does not exist any more.*newest versions are 2") as caught:
        ray_train.version_of(train.checkpoint(first))
    assert caught.value.subject == repository.uri
    other = create_repository(str(tmp_path / "other"))
    with pytest.raises(NotFound, match=other.id):
        ray_train.version_of(train.checkpoint(first), uri=other.uri)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"raystow": 1}', '{"raystow": {"uri": "a"}}', '{"raystow": {"uri": 7}}'])
def test_an_invalid_pointer_file_is_reported(
    repository: Repository, train: Train, commit: Any, tmp_path: Path, text: str
) -> None:
    with pytest.raises(StateError, match="does not point"):
        read(Pointer(str(tmp_path), train.filesystem))
    (tmp_path / FILE).write_text(text)
    with pytest.raises(Damaged):
        read(Pointer(str(tmp_path), train.filesystem))


def test_prune_drops_versions_deleted_after_the_run(repository: Repository, train: Train, commit: Any) -> None:
    sync = new_process(repository, train, train.place.name)
    entries = [commit(step) for step in (1, 2, 3)]
    sync.collect()
    train.take_reports_of(sync)
    train.drop(1)

    class Result:
        path = str(train.place)
        checkpoint = train.checkpoint(entries[2])
        best_checkpoints = ((train.checkpoint(entries[1]), {}),)

    ray_train.prune(Result)  # type: ignore[arg-type]
    assert live_ids(repository) == [2, 3]


def replace_methods(monkeypatch: pytest.MonkeyPatch, **methods: Callable[..., Any]) -> None:
    """Replace methods of a checkpointer that synchronizes nothing."""
    replace_parts(monkeypatch, [(ray_train.Checkpointer, name, method) for name, method in {"_sync": None, **methods}.items()])


@pytest.mark.parametrize("error", [SaveFailed("no space"), OutcomeUnknown("no answer")])
def test_a_rank_reports_whose_earlier_save_failed(error: RaystowError, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks have no failed save, and wait for this rank in ``report``."""
    rank, reports = ray_train.Checkpointer.__new__(ray_train.Checkpointer), list[int]()

    def fail(*_: object, **named: object) -> None:
        raise error

    monkeypatch.setattr(raystow.Checkpointer, "save", fail)
    replace_methods(monkeypatch, report=lambda self: reports.append(1))
    with pytest.raises(type(error)):
        rank.save({}, step=2)
    assert reports == [1]


def test_close_reports_before_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks have no failed save, and wait for this rank in ``report``. A second call does nothing."""
    rank, reports, open = ray_train.Checkpointer.__new__(ray_train.Checkpointer), list[int](), [True]
    rank.failures = Failures("raise", count=lambda: None)
    rank.failures.failed(1, SaveFailed("no space"))
    replace_methods(monkeypatch, _release=lambda self: bool(open and open.pop()), report=lambda self: reports.append(1))
    with pytest.raises(SaveFailed, match="no space"):
        rank.close()
    rank.close()
    assert reports == [1]


@pytest.mark.parametrize(
    ("kind", "address"), [("local", "/runs/x/raystow"), ("s3", "s3://runs/x/raystow"), ("gcs", "gs://runs/x/raystow")]
)
def test_the_repository_is_in_the_storage_of_train(kind: str, address: str) -> None:
    path = "/runs/x" if kind == "local" else "runs/x"
    named: Any = SimpleNamespace(type_name=kind)
    assert repository_in(named, path) == address
    named.type_name = "abfs"
    with pytest.raises(StateError, match=r"of type 'abfs', does not tell .*pass uri="):
        repository_in(named, path)


def test_the_store_is_reached_as_by_trains_filesystem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its endpoint, region and credentials replace those of the environment, and travel with the settings; a text shows none."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://elsewhere:1")
    filesystem = pyarrow.fs.S3FileSystem(
        access_key="key", secret_key="secret", endpoint_override="minio:9000", scheme="http", region="eu-1"
    )
    found = settings_of(store_in(filesystem, "s3://runs/x/raystow"))
    assert (found.client["endpoint"], found.client["region"]) == ("http://minio:9000", "eu-1")
    assert found.credentials == {"access_key": "key", "secret_key": "secret"}
    assert "secret" not in repr(found)
    by_address, _ = pyarrow.fs.FileSystem.from_uri("s3://runs/x?endpoint_override=http%3A%2F%2Fminio%3A9000&region=eu-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "own")
    other = settings_of(store_in(by_address, "s3://runs/x/raystow"))
    assert (other.place, other.credentials["access_key"]) == (found.place, "mine")


@pytest.mark.parametrize(
    ("filesystem", "named"),
    [
        (lambda: pyarrow.fs.S3FileSystem(anonymous=True, region="eu-1"), "anonymous"),
        (lambda: pyarrow.fs.S3FileSystem(role_arn="arn:aws:iam::1:role/x", region="eu-1"), "role_arn"),
        (lambda: pyarrow.fs.S3FileSystem(region="eu-1", proxy_options="http://proxy:1"), "proxy_options"),
        (lambda: pyarrow.fs.GcsFileSystem(endpoint_override="minio:1", anonymous=True), "anonymous"),
    ],
)
def test_ways_that_cannot_be_taken_over_are_refused_by_name(filesystem: Callable[[], Any], named: str) -> None:
    with pytest.raises(StateError, match=rf"cannot take over {named} of Train's file system .*pass uri="):
        store_in(filesystem(), "s3://runs/x/raystow")
