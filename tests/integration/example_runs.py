"""Examples run in processes of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
from helpers.polling import wait_until

import raystow

_EXAMPLES = Path(__file__).parents[2] / "examples"
_SECONDS = 300


def run_example(example: str, *arguments: object, cwd: Path, kill_a_worker: str = "", status: int = 0, **environment: str) -> str:
    """Run an example and return its stdout. ``kill_a_worker``: a repository; a worker of Ray Train is killed after its first
    save. ``status``: the exit status."""
    with subprocess.Popen(
        [sys.executable, str(_EXAMPLES / example), *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "HOME": str(cwd), "RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            if kill_a_worker:
                _kill_a_worker(process.pid, kill_a_worker)
            printed, errors = process.communicate(timeout=_SECONDS)
        finally:
            process.kill()
    assert process.returncode == status, errors
    return printed


def _kill_a_worker(driver: int, uri: str) -> None:
    def saved() -> bool:
        with contextlib.suppress(raystow.NotARepository):
            return raystow.latest(uri) is not None
        return False

    wait_until(saved, "the example has saved a version", _SECONDS)
    workers = [one for one in psutil.Process(driver).children(recursive=True) if "RayTrainWorker" in " ".join(one.cmdline())]
    workers[-1].kill()
