"""The demo, as a person runs it: to its end, and into Ctrl-C.

To its end it takes minutes: ``make soak`` runs it so, and ``make test-s3`` on S3.
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
from builders import orphans
from polling import wait_until

import raystow

DEMO = [sys.executable, "-m", "raystow", "demo"]


def ours(marker: str) -> list[psutil.Process]:
    """Processes that carry a marker in their environment: the demo and everything it started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAYSTOW_TEST_MARKER") == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.slow
def test_a_lost_node_changes_no_bit(tmp_path: Path) -> None:
    done = subprocess.run(
        [*DEMO, "--steps", "8", "--every", "2"], cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Bit for bit the same as without the failure" in done.stdout
    assert "killed a node during the save of step 4" in done.stdout
    assert "lost: 0 steps" in done.stdout
    repositories = [raystow.open(tmp_path / "raystow-demo" / run) for run in ("undisturbed", "disturbed")]
    # The save of step 4 died with its node, unless that had stored its part by then; the training went on after step 4.
    kept = [(version.id, version.step) for version in repositories[1].versions()]
    assert kept in ([(1, 2), (3, 6), (4, 8)], [(1, 2), (2, 4), (3, 6), (4, 8)])
    ends = [repository.latest() for repository in repositories]
    assert ends[0] is not None
    assert ends[1] is not None
    for name in ends[0].tensors():
        assert ends[0].read(name).equal(ends[1].read(name)), name
    assert all(not orphans(repository) for repository in repositories)


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    """While the cluster is starting."""
    process = start(tmp_path)
    wait_until(lambda: len(ours(str(tmp_path))) > 5, "the cluster has started processes")
    interrupt(process, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["durable", "restored"])
def test_ctrl_c_leaves_no_process_and_no_half_version(tmp_path: Path, moment: str) -> None:
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
    """A demo that listens to Ctrl-C."""
    environment = {**os.environ, "RAYSTOW_TEST_MARKER": str(tmp_path)}
    command = [*DEMO, "--steps", "8", "--every", "2"]
    # A shell's background job ignores Ctrl-C, and so does what it starts: this process must not, however the tests were started.
    listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=listen)


def interrupt(process: subprocess.Popen[str], tmp_path: Path) -> None:
    """Ctrl-C: the demo ends, and so does all that it has started."""
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert ours(str(tmp_path)) == []
