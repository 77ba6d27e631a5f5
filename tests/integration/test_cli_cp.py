"""``raystow cp`` copies versions to another repository, once or continuously."""

from __future__ import annotations

import contextlib
import functools
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.local_cluster import LocalCluster
from helpers.polling import wait_until

import raystow
from integration.cli_runner import ran, run_json


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with LocalCluster(str(tmp_path / "run")) as local:
        for step in (100, 200):
            local.save({"w": torch.full((10,), float(step))}, step=step)
    return tmp_path / "run"


def test_cp_reports_the_copied_versions(folder: Path, tmp_path: Path) -> None:
    there = tmp_path / "replica"
    facts = run_json("cp", folder, there, "--versions", "step:200")
    assert (facts["copied"], facts["older"], facts["rollback"]) == ([2], [], None)
    assert run_json("cp", folder, there)["older"] == [1]
    assert ran("cp", folder, tmp_path / "all").stdout.startswith("copied 2 versions (1, 2), ")
    assert ran("cp", folder, tmp_path / "all").stdout == "nothing to copy\n"
    assert run_json("verify", tmp_path / "all", "--all", "--deep")["versions"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_watch_copies_new_versions_until_a_signal(folder: Path, tmp_path: Path, number: int) -> None:
    there = tmp_path / "replica"
    words = [sys.executable, "-m", "raystow", "cp", str(folder), str(there), "--watch", "--interval", "0.05s"]

    def newest() -> int:
        try:
            version = raystow.latest(there)
        except (raystow.NotARepository, raystow.Damaged):  # the copy creates the repository now
            return 0
        return version.id if version is not None else 0

    heed = functools.partial(signal.signal, number, signal.SIG_DFL)  # nohup may have started the tests
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed) as watching,
        contextlib.ExitStack() as ended,
    ):
        ended.callback(watching.kill)
        try:
            wait_until(lambda: newest() == 2, "the versions are copied")
            with LocalCluster(str(folder)) as local:
                local.save({"w": torch.full((10,), 300.0)}, step=300)
            wait_until(lambda: newest() == 3, "the new version is copied")
        finally:
            watching.send_signal(number)
        _, errors = watching.communicate(timeout=60)
    assert (watching.returncode, errors) == (0, "")
    assert float(raystow.open(there).version(3).read("w")[0]) == 300
