"""Versions in W&B, MLflow and TensorBoard, with the real libraries and without a network. `make test-trackers` installs them."""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from raystow import trackers
from raystow.orchestrator.client import version_callbacks
from raystow.orchestrator.client.version_callbacks import VersionCallbacks
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import StateError
from raystow.storage.format.version_record import FragmentInfo, VersionRecord
from raystow.storage.repository import create_repository
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.versions.version import Version

FIGURES = {"version": 1, "raw_bytes": 1000, "stored_bytes": 710, "ratio": 0.71, "stall_seconds": 0.25}


@pytest.fixture
def version() -> Version:
    committer = Committer(create_repository(f"memory://{SYSTEM.token()}"), "test")
    id, attempt = committer.reserve()
    record = VersionRecord(committer.catalog.id, id, attempt, committer.epoch, 40, created=1000.0, world_size=1)
    fragments = (FragmentInfo(0, 1, "", (0,), 0, 1000, 710, 0.25),)
    return committer.catalog.at(committer.commit(replace(record, fragments=fragments)).entry)


def tell(callback: trackers.VersionCallback, version: Version) -> None:
    """Call the callback on another thread, as a ``Checkpointer`` does."""
    callbacks = VersionCallbacks([callback], logging.getLogger("raystow"))
    callbacks.tell(version)
    callbacks.close()


def test_wandb_logs_the_figures(version: Version, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = wandb.init(project="raystow", dir=str(tmp_path))
    run.log({"loss": 2.0}, step=50)  # later than the step of the version
    tell(trackers.Wandb(), version)
    run.log({"loss": 1.0}, step=51, commit=True)
    logged = {name: run.summary[name] for name in ("loss", "raystow/step", *(f"raystow/{name}" for name in FIGURES))}
    run.finish()
    assert logged == {"loss": 1.0, "raystow/step": 40, **{f"raystow/{name}": value for name, value in FIGURES.items()}}
    (written,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert b"raystow/stall_seconds" in written.read_bytes()


def test_wandb_without_a_run_is_refused(version: Version) -> None:
    pytest.importorskip("wandb")
    with pytest.raises(StateError, match="no run of W&B is active"):
        trackers.Wandb().on_version(version)


def test_mlflow_logs_the_figures(version: Version, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    with mlflow.start_run() as run:
        tell(trackers.Mlflow(), version)
    client = mlflow.MlflowClient()
    for name, value in FIGURES.items():
        (metric,) = client.get_metric_history(run.info.run_id, f"raystow/{name}")
        assert (metric.value, metric.step) == (value, 40)


def test_tensorboard_logs_the_figures(version: Version, tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("tensorboardX")
    from tensorboardX.proto import event_pb2

    writer = tensorboard.SummaryWriter(str(tmp_path))
    tell(trackers.TensorBoard(writer), version)
    writer.close()
    (file,) = tmp_path.iterdir()
    data, found = file.read_bytes(), dict[str, tuple[int, float]]()
    while data:  # length, its checksum, the event, its checksum
        length = int.from_bytes(data[:8], "little")
        event = event_pb2.Event.FromString(data[12 : 12 + length])
        found |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
        data = data[16 + length :]
    assert found == {f"raystow/{name}": (40, pytest.approx(value)) for name, value in FIGURES.items()}


def test_a_callback_that_raises_is_logged(version: Version, caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def on_version(self, version: Version) -> None:
            raise ConnectionError("no network")

    class Noting:
        def on_version(self, version: Version) -> None:
            noted.append((version, threading.current_thread()))

    noted: list[tuple[Version, threading.Thread]] = []
    callbacks = VersionCallbacks([Failing(), Noting()], logging.getLogger("raystow"))
    with caplog.at_level(logging.WARNING):
        callbacks.tell(version)
        callbacks.close()
    assert caplog.messages == ["Failing failed for version 1: ConnectionError: no network"]
    ((noted_version, thread),) = noted
    assert noted_version == version
    assert thread is not threading.current_thread()
    caplog.clear()
    callbacks.tell(version)
    assert [text.split(" was not called for version 1")[0] for text in caplog.messages] == ["Failing", "Noting"]
    assert len(noted) == 1


def test_close_ends_although_a_callback_hangs(version: Version, caplog: pytest.LogCaptureFixture) -> None:
    """Its thread does not keep the process alive either."""

    class Hanging:
        def on_version(self, version: Version) -> None:
            calling.put(threading.current_thread())
            end.wait()

    calling, end = queue.SimpleQueue[threading.Thread](), threading.Event()
    callbacks = VersionCallbacks([Hanging()], logging.getLogger("raystow"), patience=0.1)
    callbacks.tell(version)
    thread = calling.get(timeout=10)
    closing = threading.Thread(target=callbacks.close, daemon=True)
    closing.start()
    closing.join(10)
    ended = not closing.is_alive()
    end.set()
    assert ended
    assert thread.daemon
    assert caplog.messages == ["Hanging has not returned for version 1; close() does not wait for it any longer"]


def test_a_version_found_while_close_begins_is_told(version: Version, monkeypatch: pytest.MonkeyPatch) -> None:
    versions, closing = list[int](), threading.Thread(target=lambda: callbacks.close())

    class Noting:
        def on_version(self, version: Version) -> None:
            versions.append(version.id)

    class Slow(queue.SimpleQueue):  # type: ignore[type-arg]
        def put(self, item: object) -> None:  # type: ignore[override]
            if item is not None:
                closing.start()
                closing.join(0.2)
            super().put(item)

    monkeypatch.setattr(version_callbacks, "queue", SimpleNamespace(SimpleQueue=Slow))
    callbacks = VersionCallbacks([Noting()], logging.getLogger("raystow"))
    callbacks.tell(version)
    closing.join(10)
    assert versions == [1]
