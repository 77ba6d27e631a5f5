"""The command line without a usual terminal: closed streams, signals, few columns."""

from __future__ import annotations

import functools
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_runner import ran
from local_cluster import LocalCluster

RAYSTOW = [sys.executable, "-m", "raystow"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with LocalCluster(str(tmp_path / "run")) as local:
        for step in (100, 200):
            local.save({"w": torch.full((12345,), float(step))}, step=step)
    return tmp_path / "run"


def test_a_question_is_not_answered_without_stdin(folder: Path) -> None:
    words = ["sh", "-c", 'exec "$@" <&-', "sh", *RAYSTOW, "prune", str(folder), "--keep-last", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "there was no answer, so nothing was dropped\n  try: pass --yes" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_a_command_as_ctrl_c_does(folder: Path, number: int) -> None:
    """Otherwise the process would end at once: a restore would leave its files, and a demo its cluster."""
    words = [*RAYSTOW, "prune", str(folder), "--keep-last", "1"]
    heed = functools.partial(signal.signal, number, signal.SIG_DFL)  # nohup may have started the tests
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=heed) as process:
        assert process.stderr is not None
        asked = process.stderr.read(len("drop 1 version? [y/N] "))
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, asked + errors) == (130, b"drop 1 version? [y/N] interrupted\n")


def test_a_signal_that_is_ignored_stays_ignored(folder: Path) -> None:
    """Such as SIGHUP below nohup."""
    words = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *RAYSTOW, "prune", str(folder), "--keep-last", "1"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stderr.read(len("drop 1 version? [y/N] "))
        process.send_signal(signal.SIGHUP)
        output, _ = process.communicate(b"n\n", timeout=60)
    assert process.returncode == 0
    assert b"nothing was dropped" in output


def test_few_columns_cut_no_cell_of_a_table(folder: Path) -> None:
    wide, narrow = (ran("ls", folder, columns=columns).stdout.splitlines()[:3] for columns in (80, 20))
    assert [re.split("  +", line.strip()) for line in narrow] == [re.split("  +", line.strip()) for line in wide]
