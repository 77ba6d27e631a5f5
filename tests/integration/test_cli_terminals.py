"""The command line without a usual terminal: closed streams, signals, few columns."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cli_runner import ran
from local_cluster import LocalCluster
from polling import wait_until

from raystow.storage.clock import SYSTEM

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


HANGING = """
import threading
from raystow.orchestrator.cli import app
from raystow.storage.stores.local import LocalStore

def hang(*args):
    print("reading", flush=True)
    threading.Event().wait()

LocalStore.get_range = LocalStore.get_range_into = hang
{more}
app.main()
"""


@contextlib.contextmanager
def reading_for_ever(folder: Path, more: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Start a copy whose threads wait for ever for packs, as for a file server that is gone."""
    words = [sys.executable, "-c", HANGING.format(more=more), "cp", str(folder), str(folder.parent / "replica")]
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"reading\n"
            yield process
        finally:
            process.kill()


def test_a_second_signal_ends_a_command_that_hangs(folder: Path) -> None:
    with reading_for_ever(folder) as process:

        def ended() -> bool:
            process.send_signal(signal.SIGINT)
            return process.poll() is not None

        wait_until(ended, "the command ends")
        assert (process.returncode, process.communicate()[1]) == (130, b"interrupted\n")


def test_a_command_that_hangs_ends_some_time_after_a_signal(folder: Path) -> None:
    more = "from raystow.orchestrator.cli import interrupts; interrupts._CLEANING = 0.1"
    with reading_for_ever(folder, more) as process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"interrupted\n")


def test_a_command_that_hangs_at_its_exit_says_once_that_it_ends(folder: Path) -> None:
    script = """
import threading
from raystow.orchestrator.cli import app, interrupts

interrupts._CLEANING = 0.1
threading.Thread(target=threading.Event().wait).start()
app.main()
"""
    words = [sys.executable, "-c", script, "prune", str(folder), "--keep-last", "1"]
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=heed) as process:
        assert process.stderr is not None
        process.stderr.read(len("drop 1 version? [y/N] "))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0.01 * number for number in range(20)])
def test_a_copy_ends_at_a_signal_at_any_moment(folder: Path, moment: float) -> None:
    replica = folder.parent / "replica"
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen([*RAYSTOW, "cp", folder, replica], stderr=subprocess.PIPE, preexec_fn=heed) as process:
        wait_until(replica.exists, "the copy begins", pause=0.001)
        SYSTEM.sleep(moment)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    done = (0, b""), (-signal.SIGINT, b"")  # after its end, Python does not handle signals
    assert (process.returncode, errors) in ((130, b"interrupted\n"), *done)


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


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["ls", "--json"], ["ls"]])
def test_a_full_disk_is_an_error_without_a_traceback(folder: Path, words: list[str]) -> None:
    where = [folder] if "ls" in words else []
    with open("/dev/full", "w") as full:
        done = subprocess.run([*RAYSTOW, *words, *where], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


def test_help_in_few_columns_of_an_ascii_terminal() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "20"}
    done = subprocess.run([*RAYSTOW, "--help"], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_few_columns_cut_no_cell_of_a_table(folder: Path) -> None:
    wide, narrow = (ran("ls", folder, columns=columns).stdout.splitlines()[:3] for columns in (80, 20))
    assert [re.split("  +", line.strip()) for line in narrow] == [re.split("  +", line.strip()) for line in wide]
