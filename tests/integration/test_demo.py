"""The demo command, run to completion and interrupted by Ctrl-C and SIGTERM.

A complete run takes minutes: ``make soak`` includes it, and ``make test-s3`` runs it on S3.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers.builders import orphans
from helpers.polling import wait_until

import raystow
from integration.cli_runner import ran

DEMO = [sys.executable, "-m", "raystow", "demo"]


def ours(marker: str) -> list[psutil.Process]:
    """Return the processes with this marker in their environment: the demo and its descendants."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAYSTOW_TEST_MARKER") == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.slow
def test_losing_a_node_does_not_change_the_result(tmp_path: Path) -> None:
    done = subprocess.run(
        [*DEMO, "--steps", "8", "--every", "2"], cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Bit for bit the same as without the failure" in done.stdout
    assert "killed a node during the save of step 4" in done.stdout
    assert "lost: 0 steps" in done.stdout
    repositories = [raystow.open(tmp_path / "raystow-demo" / run) for run in ("undisturbed", "disturbed")]
    # The save of step 4 is lost with its node, unless the node had stored its part; training continued from step 4.
    kept = [(version.id, version.step) for version in repositories[1].versions()]
    assert kept in ([(1, 2), (3, 6), (4, 8)], [(1, 2), (2, 4), (3, 6), (4, 8)])
    ends = [repository.latest() for repository in repositories]
    assert ends[0] is not None
    assert ends[1] is not None
    for name in ends[0].tensors():
        assert ends[0].read(name).equal(ends[1].read(name)), name
    assert all(not orphans(repository) for repository in repositories)


def test_only_the_folder_of_a_demo_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "thesis.txt").write_text("precious")
    error = ran("demo", "--store", tmp_path, code=2).stderr
    assert error.startswith(f"error: {tmp_path}: is not empty and not from a demo\n")
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_too_few_steps_for_a_save_after_the_failure_are_refused(tmp_path: Path) -> None:
    assert "--every" in ran("demo", "--store", tmp_path / "x", "--steps", 8, "--every", 4, code=2).stderr
    assert not (tmp_path / "x").exists()


def test_a_cluster_that_cannot_start_is_reported(tmp_path: Path) -> None:
    """The folder is the current one, which cannot be removed and made again."""
    environment = {**os.environ, "RAY_TMPDIR": "/proc/nowhere"}
    done = subprocess.run([*DEMO, "--store", "."], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    error, remedy = done.stderr.splitlines()
    assert error.startswith(f"error: {tmp_path / 'log.txt'}: the cluster's process ended with 1: FileNotFoundError")
    assert remedy == "  try: read the whole file"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_startup_leaves_no_process(tmp_path: Path, number: int) -> None:
    process = start(tmp_path)
    wait_until(lambda: len(ours(str(tmp_path))) > 5, "the cluster has started processes")
    interrupt(process, tmp_path, number)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["durable", "restored"])
def test_ctrl_c_leaves_no_process_and_no_incomplete_version(tmp_path: Path, moment: str) -> None:
    process = start(tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if moment in line:
            break
    assert len(ours(str(tmp_path))) > 5
    interrupt(process, tmp_path)
    for run in ("undisturbed", "disturbed"):
        if (tmp_path / "raystow-demo" / run).exists():
            repository = raystow.open(tmp_path / "raystow-demo" / run)
            assert orphans(repository) == []
            for version in repository.versions():
                repository.verify(version)


def start(tmp_path: Path) -> subprocess.Popen[str]:
    """Start a demo that reacts to Ctrl-C."""
    environment = {**os.environ, "RAYSTOW_TEST_MARKER": str(tmp_path)}
    command = [*DEMO, "--steps", "8", "--every", "2"]
    # A background job of a shell and its children ignore SIGINT; the demo must react to it in any case.
    listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=listen)


def interrupt(process: subprocess.Popen[str], tmp_path: Path, number: int = signal.SIGINT) -> None:
    """Send Ctrl-C or another signal, and assert that the demo and all of its processes end."""
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert ours(str(tmp_path)) == []
