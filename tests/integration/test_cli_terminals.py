"""The command line without a usual terminal: closed streams, signals, few columns."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer
from helpers.local_cluster import LocalCluster
from helpers.polling import wait_until
from safetensors.torch import save_file

import raystow
from integration.cli_runner import ran
from integration.command_processes import CLOSED, FULL, Ended, ended
from raystow.cli.app import build
from raystow.storage.runtime.clock import SYSTEM

pytestmark = pytest.mark.long  # all commands, in processes

RAYSTOW = [sys.executable, "-m", "raystow"]


def two_versions(folder: Path) -> Path:
    with LocalCluster(str(folder)) as local:
        for step in (100, 200):
            local.save({"w": torch.full((12345,), float(step))}, step=step)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return two_versions(tmp_path / "run")


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
from raystow.cli import app
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
    more = "from raystow.cli import interrupts; interrupts._CLEANING = 0.1"
    with reading_for_ever(folder, more) as process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"interrupted\n")


def test_a_command_that_hangs_at_its_exit_says_once_that_it_ends(folder: Path) -> None:
    script = """
import threading
from raystow.cli import app, interrupts

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


PRINTING = {
    "": ("--help",),
    "version": ("--version",),
    "json": ("ls", "RUN", "--json"),
    "usage": ("ls", "--help"),
    "failing": ("ls", "NEW", "--json"),
    "demo": ("demo", "--store", "NEW"),
    "doctor": ("doctor",),
    "keygen": ("keygen", "NEW"),
    "log": ("log", "RUN"),
    "ls": ("ls", "RUN"),
    "show": ("show", "RUN"),
    "diff": ("diff", "RUN", "1", "2"),
    "verify": ("verify", "RUN", "--all"),
    "restore": ("restore", "RUN", "--output", "NEW"),
    "export": ("export", "RUN", "--hf", "NEW", "--prefix", ""),
    "import": ("import", "FILE", "NEW"),
    "cp": ("cp", "RUN", "NEW"),
    "plan": ("plan", "RUN", "--world", "2"),
    "pin": ("pin", "RUN", "1", "best"),
    "unpin": ("unpin", "RUN", "good"),
    "rollback": ("rollback", "RUN", "1"),
    "prune": ("prune", "RUN", "--keep-last", "1", "--yes"),
    "compact": ("compact", "RUN", "--yes"),
    "gc": ("gc", "RUN", "--yes"),
    "repair": ("repair", "RUN", "--yes"),
    "advise": ("advise", "RUN", "--mtbf", "12h", "--stall", "1"),
    "cost": ("cost", "RUN", "--gpus", "8", "--gpu-price", "4", "--store-price", "1", "--every", "1h", "--write-rate", "1GB"),
    "report": ("report", "RUN", "--output", "NEW"),
    "top": ("top", "--interval", "0s"),
    "drain": ("drain", "--within", "1s"),
}
"""A command line that prints, for each command and for what all commands print. RUN: a copy of a repository; NEW: a new path."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Ended]]:
    """How each of these commands ended, by output."""
    base = tmp_path_factory.mktemp("outputs")
    made = two_versions(base / "run")
    raystow.open(made).pin(raystow.open(made).version(1), "good")
    save_file({"w": torch.ones(3)}, base / "w.safetensors")
    found = {}
    for output in (FULL, CLOSED):
        commands = []
        for number, words in enumerate(PRINTING.values()):
            place = base / f"{output[:4]}-{number}"
            paths = {"RUN": place / "run", "NEW": place / "new", "FILE": base / "w.safetensors"}
            shutil.copytree(made, paths["RUN"])
            commands.append([str(paths.get(word, word)) for word in words])
        found[output] = dict(zip(PRINTING, ended(commands, output), strict=True))
    return found


def test_an_output_of_every_command_is_tested() -> None:
    assert {*typer.main.get_command(build()).commands} <= {*PRINTING}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", PRINTING)
def test_a_full_disk_is_one_error(outcomes: dict[str, dict[str, Ended]], name: str) -> None:
    assert outcomes[FULL][name] == Ended(1, "error: No space left on device\n")


@pytest.mark.parametrize("name", PRINTING)
def test_a_command_whose_output_is_closed_ends_as_other_tools(outcomes: dict[str, dict[str, Ended]], name: str) -> None:
    assert outcomes[CLOSED][name] == Ended(-signal.SIGPIPE, "")


def test_without_a_terminal_a_row_is_one_line(tmp_path: Path) -> None:
    """Whatever the width of the terminal that started it."""
    folder, name = two_versions(tmp_path / "run"), "a-pin-with-a-name-of-some-length-" * 3
    ran("pin", folder, 1, name)
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    done = subprocess.run([*RAYSTOW, "ls", str(folder)], env=environment, capture_output=True, text=True, timeout=120)
    (line,) = (line for line in done.stdout.splitlines() if " 100 " in line)
    assert re.split("  +", line.strip())[-1] == name
    assert len(done.stdout.splitlines()) == 4


def test_help_in_few_columns_of_an_ascii_terminal() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "20"}
    done = subprocess.run([*RAYSTOW, "--help"], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_few_columns_cut_no_cell_of_a_table(folder: Path) -> None:
    wide, narrow = (ran("ls", folder, columns=columns).stdout.splitlines()[:3] for columns in (80, 20))
    assert [re.split("  +", line.strip()) for line in narrow] == [re.split("  +", line.strip()) for line in wide]
