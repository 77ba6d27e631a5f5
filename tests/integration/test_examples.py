"""Each example runs as in its docstring: in a separate process, from any folder.

Examples with Ray Train take minutes: ``make soak`` runs them, ``make test-s3`` one of them, and ``make test`` the others.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from ray.cluster_utils import Cluster

import raystow
from integration.example_runs import run_example


@pytest.fixture(scope="module")
def saved(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run ``save_and_restore.py`` on the shared cluster; return its repository and its stdout."""
    folder = tmp_path_factory.mktemp("saved")
    return folder / "run", run_example("save_and_restore.py", folder / "run", cwd=folder, RAY_ADDRESS=cluster.address)


def test_save_and_restore_restores_every_bit(saved: tuple[Path, str]) -> None:
    uri, printed = saved
    assert "durable: Version(id=1, step=1" in printed
    assert "restored version 1, step 1: same bits" in printed
    version = raystow.open(uri).latest()
    assert version is not None
    assert version.metrics == {"loss": 2.5}


def test_reading_needs_neither_ray_nor_torch(saved: tuple[Path, str], tmp_path: Path) -> None:
    for absent in ("ray", "torch"):
        (tmp_path / f"{absent}.py").write_text("raise ImportError('not on this machine')")
    printed = run_example("read_without_ray.py", saved[0], cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert "version 1, step 1, saved by 1 ranks, metrics {'loss': 2.5}" in printed
    assert "model.weight  float32 [1024, 1024]  4,194,304 bytes" in printed
    assert "the first rows of model.weight as numpy.ndarray:" in printed


@pytest.mark.long
def test_a_killed_run_with_a_buffer_trains_each_sample_once(cluster: Cluster, tmp_path: Path) -> None:
    """As many samples, and the same weights, bit for bit, as a run that is not killed."""
    address = {"cwd": tmp_path, "RAY_ADDRESS": cluster.address}
    whole = run_example("rl_buffer.py", "whole", 40, **address)
    run_example("rl_buffer.py", "killed", 40, 35, status=-signal.SIGKILL, **address)
    printed = run_example("rl_buffer.py", "killed", 40, **address)
    assert "resumed at step" in printed
    assert printed.splitlines()[-1] == whole.splitlines()[-1]
    assert {*raystow.open(tmp_path / "killed").version("latest").parts()} == {"buffer"}


@pytest.mark.slow
def test_ray_train_continues_a_finished_run(tmp_path: Path) -> None:
    for steps in (2, 4):
        printed = run_example("ray_train_fsdp2.py", "runs", steps, cwd=tmp_path)
    # If the second run had started anew, step 2 would exist twice.
    assert [line.split(",")[0] for line in printed.splitlines()] == ["version 1: step 2", "version 2: step 4"]


@pytest.mark.slow
@pytest.mark.s3
def test_ray_train_keeps_two_versions_on_s3(s3_uri: str, tmp_path: Path) -> None:
    printed = run_example("ray_train_fsdp2.py", s3_uri, 6, cwd=tmp_path)
    assert [line.split(",")[0] for line in printed.splitlines()] == ["version 2: step 4", "version 3: step 6"]
    entries = raystow.open(f"{s3_uri}/fsdp2/raystow").root().versions
    needed = {id for entry in entries for id in entry.bases}  # bases stay after Train dropped their versions
    kept = [entry.step for entry in entries if entry.id not in needed or entry.step > 2]
    assert kept == [4, 6]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "run", "stop", "end"),
    [("ray_train_lightning.py", "autoencoder", 2, 8), ("ray_train_huggingface.py", "gpt2", 6, 24)],
)
def test_other_trainers_resume_bit_for_bit(tmp_path: Path, example: str, run: str, stop: int, end: int) -> None:
    """A training that was stopped and resumed, or lost a worker, ends with the weights and moments of an undisturbed training."""
    run_example(example, "undisturbed", end, cwd=tmp_path)
    for steps in (stop, end):
        run_example(example, "stopped", steps, cwd=tmp_path)
    run_example(example, "killed", end, cwd=tmp_path, kill_a_worker=str(tmp_path / "killed" / run / "raystow"))
    kept = [raystow.open(tmp_path / name / run / "raystow").versions() for name in ("undisturbed", "stopped", "killed")]
    assert kept[0][-1].id == kept[1][-1].id, "the resumed training started anew"
    whole = {name: kept[0][-1].read(name) for name in kept[0][-1].tensors()}
    for versions in kept:
        assert [version.step for version in versions] == [version.step for version in kept[0]]
        assert len(versions) == 2, "Train keeps two"
        assert versions[-1].tensors().keys() == whole.keys()
        assert all(torch.equal(versions[-1].read(name), tensor) for name, tensor in whole.items())
