"""A training with torchft: replicas recover from each other, and the whole training from its durable versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import raystow
from integration.example_runs import run_example

pytest.importorskip("torchft", reason="make test-frameworks installs torchft in an environment of its own")


def test_a_torchft_training_resumes_from_its_versions(tmp_path: Path) -> None:
    """The example uses torchft's lighthouse and Manager under Ray Train's ``TorchftConfig``."""
    run = tmp_path / "run"
    first, second = run_example("ray_train_torchft.py", run, 30, 12, cwd=tmp_path).splitlines()[-2:]
    assert (run / "killed").exists()
    killed = re.search(r"replica 1: restored step (\d+), got the state of step \[(\d+)\]; ended at step 30, sum ", second)
    assert killed
    assert (int(killed[1]), int(killed[2]) >= 12) == (10, True)
    assert first.partition("ended at ")[2] == second.partition("ended at ")[2]
    newest = raystow.latest(run / "versions")
    assert newest is not None
    assert newest.step == 30
    resumed = run_example("ray_train_torchft.py", run, 40, cwd=tmp_path).splitlines()[-2:]
    assert [line.partition(",")[0] for line in resumed] == ["replica 0: restored step 30", "replica 1: restored step 30"]
    assert len({line.partition("ended at ")[2] for line in resumed}) == 1
