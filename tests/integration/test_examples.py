"""The examples, each as its reader would run it: a process of its own, from any folder, by the command in its docstring."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import raystow

_EXAMPLES = Path(__file__).parents[2] / "examples"
_SECONDS = 300


def _run(example: str, *arguments: object, cwd: Path, **environment: str) -> str:
    """What the example prints."""
    done = subprocess.run(
        [sys.executable, str(_EXAMPLES / example), *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "HOME": str(cwd), "RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled", **environment},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The repository that ``save_and_restore.py`` makes, and what it prints."""
    folder = tmp_path_factory.mktemp("saved")
    return folder / "run", _run("save_and_restore.py", folder / "run", cwd=folder)


def test_save_and_restore_gets_every_bit_back(saved: tuple[Path, str]) -> None:
    uri, printed = saved
    assert "durable: Version(id=1, step=1" in printed
    assert "restored version 1, step 1: same bits" in printed
    version = raystow.open(uri).latest()
    assert version is not None
    assert version.metrics == {"loss": 2.5}


def test_reading_takes_neither_ray_nor_torch(saved: tuple[Path, str], tmp_path: Path) -> None:
    for absent in ("ray", "torch"):
        (tmp_path / f"{absent}.py").write_text("raise ImportError('not on this machine')")
    printed = _run("read_without_ray.py", saved[0], cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert "version 1, step 1, saved by 1 ranks, metrics {'loss': 2.5}" in printed
    assert "model.weight  float32 [1024, 1024]  4,194,304 bytes" in printed
    assert "the first rows of model.weight as numpy.ndarray:" in printed


def test_ray_train_goes_on_where_it_stopped(tmp_path: Path) -> None:
    for steps in (2, 4):
        printed = _run("ray_train_fsdp2.py", "run", steps, cwd=tmp_path)
    # Had the second run begun anew, step 2 would be there twice.
    assert [line.split(",")[0] for line in printed.splitlines()] == ["version 1: step 2", "version 2: step 4"]
