"""Ray Train with failing workers, nodes and stores, and with resumed runs: no durable step is lost, and Train and the
repository keep the same versions."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.polling import wait_until
from ray.cluster_utils import Cluster
from ray.train import TrainingFailedError

import raystow
from integration.ray_train_runs import DEADLINE, SPARE, Run, Spares, check, drain, expected, kill, score, trainer
from integration.ray_trainer_runs import TRAINERS
from raystow import ray_train

pytestmark = pytest.mark.slow


def agree(result: Any, uri: str | Path) -> list[int]:
    """Assert that Train and the repository keep the same versions with the expected values; return their steps, oldest first."""
    repository = raystow.open(uri)
    versions = repository.versions()
    listed = [ray_train.version_of(checkpoint) for checkpoint, _ in result.best_checkpoints]
    last = ray_train.version_of(result.checkpoint)
    assert {version.id for version in versions} == {version.id for version in listed} | {last.id}
    assert last == versions[-1]
    for version in versions:
        repository.verify(version)
        check(version)
    return [version.step for version in versions]


def home(folder: Path) -> Path:
    return folder / "ray" / "run" / "raystow"


def test_a_new_driver_resumes_the_run(cluster: Cluster, tmp_path: Path) -> None:
    """The last two versions and the best are kept over a worker's death and three drivers; Train alone decides the retention."""
    keep = {"num_to_keep": 2, "checkpoint_score_attribute": "score", "checkpoint_score_order": "max"}
    first = trainer(tmp_path, {"steps": 3, "die": 2}, **keep).fit()
    assert agree(first, home(tmp_path)) == [1, 2, 3]  # scores 2, 4, 1
    second = trainer(tmp_path, {"steps": 6}, **keep).fit()
    assert agree(second, home(tmp_path)) == [2, 4, 6]  # scores 4, 3, 2
    third = trainer(tmp_path, {"steps": 6}, **keep).fit()  # no step is left
    assert agree(third, home(tmp_path)) == [2, 4, 6]
    assert [step for step, _, _ in Run(tmp_path).starts()] == [0, 2, 3, 6]
    with pytest.raises(raystow.NotFound, match="dropped by Ray Train"):
        ray_train.version_of(first.checkpoint)


def test_a_run_continues_after_a_node_dies(spares: Spares, tmp_path: Path) -> None:
    run = Run(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        fit = pool.submit(trainer(tmp_path, {"steps": 6, "hold": 4, "wait": True}, on=SPARE).fit)
        wait_until(lambda: run.has("step-4"), "four steps")
        doomed = spares.of(run.starts()[-1][2])
        spares.add()
        kill(spares.cluster, doomed)
        wait_until(lambda: len(run.starts()) == 2, "a new worker group")
        run.note("go")
        result = fit.result(DEADLINE)
    assert [step for step, _, _ in run.starts()] == [0, 4]
    assert agree(result, home(tmp_path)) == [1, 2, 3, 4, 5, 6]


def test_an_elastic_group_shrinks_and_grows(spares: Spares, tmp_path: Path) -> None:
    run = Run(tmp_path)
    config = {"steps": 60, "wait": True, "pace": 0.5}
    with ThreadPoolExecutor(1) as pool:
        fit = pool.submit(trainer(tmp_path, config, workers=(1, 2), on=SPARE, num_to_keep=3).fit)
        wait_until(lambda: run.has("step-3"), "three steps")
        kill(spares.cluster, spares.of(run.starts()[-1][2]))
        wait_until(lambda: len(run.starts()) == 2 and run.reached() > run.starts()[-1][0] + 2, "one rank continues alone")
        spares.add()
        wait_until(lambda: len(run.starts()) == 3, "two ranks train again")
        result = fit.result(2 * DEADLINE)
    assert [world for _, world, _ in run.starts()] == [2, 1, 2]
    assert run.starts()[0][0] < run.starts()[1][0] < run.starts()[2][0]
    assert agree(result, home(tmp_path)) == [58, 59, 60]


def test_ranks_save_on_a_preemption_notice(spares: Spares, tmp_path: Path) -> None:
    """The node is removed a minute after the notice, and ranks save only because of the notice."""
    run = Run(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        fit = pool.submit(trainer(tmp_path, {"steps": 120, "notice": True, "pace": 0.2}, on=SPARE).fit)
        wait_until(lambda: bool(run.starts()) and run.reached() > 2, "the training runs")
        doomed = spares.of(run.starts()[-1][2])
        drain(spares.cluster, doomed, 60.0)
        wait_until(lambda: run.has("saved-on-notice"), "a save on notice", 60.0)
        version = raystow.latest(home(tmp_path))
        assert version is not None
        spares.add()
        kill(spares.cluster, doomed)
        result = fit.result(2 * DEADLINE)
    assert version.step > 2
    assert [step for step, _, _ in run.starts()] == [0, version.step]
    assert agree(result, home(tmp_path)) == [version.step, 120]


@pytest.mark.parametrize("name", TRAINERS)
def test_callbacks_of_trainers_save_on_a_preemption_notice(spares: Spares, tmp_path: Path, name: str) -> None:
    """The only save before the last step is that of the notice; the training goes on from it without the node."""
    run, steps = Run(tmp_path), 150
    with ThreadPoolExecutor(1) as pool:
        fit = pool.submit(trainer(tmp_path, {"steps": steps, "pace": 0.2}, on=SPARE, function=TRAINERS[name]).fit)
        wait_until(lambda: bool(run.starts()) and run.reached() > 2, "the training runs")
        doomed = spares.of(run.starts()[-1][2])
        drain(spares.cluster, doomed, 60.0)
        wait_until(lambda: raystow.latest(home(tmp_path)) is not None, "a save on notice")
        version = raystow.latest(home(tmp_path))
        assert version is not None
        spares.add()
        kill(spares.cluster, doomed)
        fit.result(2 * DEADLINE)
    assert 2 < version.step < steps
    assert [step for step, _, _ in run.starts()] == [0, version.step]
    assert [one.step for one in raystow.open(home(tmp_path)).versions()] == [version.step, steps]


def test_a_failing_store_does_not_stop_training(cluster: Cluster, tmp_path: Path) -> None:
    """Saves fail while the store fails; Train gets no report of these saves, and the workers continue."""
    run, uri = Run(tmp_path), tmp_path / "elsewhere"
    config = {"steps": 6, "hold": 2, "wait": True, "pace": 0.3, "options": {"uri": str(uri), "timeout": 30.0}}
    with ThreadPoolExecutor(1) as pool:
        fit = pool.submit(trainer(tmp_path, config).fit)
        wait_until(lambda: run.has("step-2"), "two steps")
        (uri / "versions").rename(uri / "away")
        (uri / "versions").write_text("no folder any more")
        run.note("go")
        wait_until(lambda: run.has("step-4"), "two failed saves")
        (uri / "versions").unlink()
        (uri / "away").rename(uri / "versions")
        result = fit.result(DEADLINE)
    assert [step for step, _, _ in run.starts()] == [0], "the worker group was not restarted"
    steps = agree(result, uri)
    assert steps[:2] == [1, 2]
    assert steps[-1] == 6
    assert 3 not in steps


@pytest.mark.parametrize("on_failure", [10, "warn"])
def test_fit_fails_with_the_last_save_unless_told(cluster: Cluster, tmp_path: Path, on_failure: str | int) -> None:
    run, uri = Run(tmp_path), tmp_path / "elsewhere"
    options = {"uri": str(uri), "timeout": 30.0, "on_failure": on_failure}
    with ThreadPoolExecutor(1) as pool:
        fit = pool.submit(trainer(tmp_path, {"steps": 2, "hold": 1, "options": options}, max_failures=0).fit)
        wait_until(lambda: run.has("step-1") and raystow.latest(uri) is not None, "a version")
        (uri / "versions").rename(uri / "away")
        (uri / "versions").write_text("no folder any more")
        run.note("go")
        with pytest.raises(TrainingFailedError, match="SaveFailed") if on_failure == 10 else contextlib.nullcontext():
            fit.result(DEADLINE)
    (uri / "versions").unlink()
    (uri / "away").rename(uri / "versions")
    assert [version.step for version in raystow.open(uri).versions()] == [1]


def validate(checkpoint: Any, worst: float) -> dict[str, float]:
    """Return the score of the version that a checkpoint refers to."""
    import torch

    into = {"w": torch.zeros(1001)}
    version = ray_train.restore(checkpoint, into=into, strict=False)
    assert torch.equal(into["w"], expected(version.step))
    return {"score": worst if version.step == 4 else score(version.step)}


def test_validation_decides_the_retention(cluster: Cluster, tmp_path: Path) -> None:
    from ray.train import ValidationConfig, ValidationTaskConfig

    validation = ValidationConfig(fn=validate, task_config=ValidationTaskConfig(fn_kwargs={"worst": -1.0}))
    keep = {"num_to_keep": 1, "checkpoint_score_attribute": "score", "checkpoint_score_order": "max"}
    config = {"steps": 5, "options": {"validation": True}}
    result = trainer(tmp_path, config, validation=validation, **keep).fit()
    (best, metrics) = result.best_checkpoints[-1]
    assert ray_train.version_of(best).step == 2
    assert metrics["score"] == 4.0
    ray_train.prune(result)
    assert agree(result, home(tmp_path)) == [2, 5]
