"""``examples/ray_train_megatron.py`` on CPU workers: killed ones resume, and another layout continues."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import raystow
from integration.example_runs import run_example

pytest.importorskip("megatron.core", reason="make test-frameworks installs Megatron-Core in an environment of its own")

EXAMPLE = "ray_train_megatron.py"


@pytest.mark.slow
def test_killed_workers_resume_and_another_layout_continues(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, sys.path))
    printed = run_example(EXAMPLE, "killed", 60, 2, 1, cwd=tmp_path, kill_a_worker=str(tmp_path / "killed"), PYTHONPATH=path)
    assert "ended at step 60" in printed
    assert "began at step 1," not in printed, "the workers began anew"
    undisturbed = run_example(EXAMPLE, "whole", 60, 2, 1, cwd=tmp_path, PYTHONPATH=path)
    assert printed.rpartition("loss")[2] == undisturbed.rpartition("loss")[2]
    saved, expected = (raystow.latest(str(tmp_path / name)) for name in ("killed", "whole"))
    assert saved is not None
    assert expected is not None
    names = [name for name in expected.tensors() if name != "common_state"]
    assert all((saved.read(name) == expected.read(name)).all() for name in names)
    assert "began at step 61, ended at step 62" in run_example(EXAMPLE, "killed", 62, 2, 2, cwd=tmp_path, PYTHONPATH=path)
