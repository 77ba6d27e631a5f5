"""A server that accepts connections and never answers: each command says what it waits for, and ends."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from helpers.store_variables import refer_to
from safetensors.torch import save_file
from typer.testing import CliRunner

from raystow.cli import wait_notice
from raystow.cli.app import COMMANDS, build
from raystow.storage.stores import request_limits
from raystow.storage.stores.request_limits import RequestLimits

IMPATIENT = RequestLimits(connect_seconds=2, stall_seconds=0.5, request_seconds=1, silent_attempts=2)
URI = "s3://bucket/run"
WORDS = {
    "advise": "advise {uri}",
    "compact": "compact {uri} --yes",
    "cost": "cost {uri}",
    "cp": "cp {uri} {folder}/copy",
    "diff": "diff {uri} 1 2",
    "doctor": "doctor {uri}",
    "export": "export {uri} 1 --torch {folder}/1.pt",
    "gc": "gc {uri} --yes",
    "import": "import {folder}/1.safetensors {uri}",
    "ls": "ls {uri}",
    "pin": "pin {uri} 1 best",
    "plan": "plan {uri} 1 --world 2",
    "prune": "prune {uri} --keep-last 1 --yes",
    "repair": "repair {uri} --yes",
    "report": "report {uri}",
    "restore": "restore {uri} 1 -o {folder}/restored",
    "rollback": "rollback {uri} 1",
    "show": "show {uri} 1",
    "unpin": "unpin {uri} best",
    "verify": "verify {uri}",
}
OFFLINE = {"demo", "drain", "keygen", "top"}
"""Commands that ask no store."""


@dataclass
class Silent:
    """A server. ``accepted``: its connections."""

    endpoint: str
    accepted: list[socket.socket] = field(default_factory=list)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Silent]:
    """Yield a server to which the variables of this process refer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Silent(f"http://127.0.0.1:{listener.getsockname()[1]}")

        def accept() -> None:
            while True:
                try:
                    server.accepted.append(listener.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        refer_to(server.endpoint, monkeypatch)
        yield server
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in server.accepted:
            connection.close()


@pytest.fixture
def impatient() -> Iterator[None]:
    """Let commands wait for less than a second, and say after a tenth what they wait for."""
    before = request_limits.of_process()
    wait_notice.say_what_is_awaited(IMPATIENT, patience=0.1, pause=0.01)
    yield
    request_limits.use(before)


@pytest.mark.parametrize("scheme", ["s3", "az", "gs"])
def test_ls_says_what_it_waits_for_and_ends(silent: Silent, impatient: None, scheme: str) -> None:
    ended = CliRunner().invoke(build(), ["ls", f"{scheme}://bucket/run"])
    assert ended.exit_code == 1
    line = f"waiting for GET of {scheme}://bucket/run/raystow.json at {silent.endpoint}; without an answer this ends after 5 s\n"
    assert ended.stderr.count(line) == ended.stderr.count("waiting") == 1
    assert len(silent.accepted) == 2


def test_a_silent_issuer_of_credentials_ends_a_command(
    silent: Silent, impatient: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("token")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/trainer")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    ended = CliRunner().invoke(build(), ["ls", URI])
    assert ended.exit_code == 1
    assert f"{silent.endpoint} does not answer" in ended.stderr
    assert len(silent.accepted) == 2


@pytest.mark.slow
def test_every_command_says_what_it_waits_for_and_ends(silent: Silent, tmp_path: Path) -> None:
    assert {name for panel in COMMANDS.values() for name in panel} == {*WORDS} | OFFLINE
    save_file({"w": torch.zeros(1)}, tmp_path / "1.safetensors")
    running = {
        name: subprocess.Popen(
            [sys.executable, "-m", "raystow", *words.format(uri=URI, folder=tmp_path).split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, words in WORDS.items()
    }
    said = {name: process.communicate()[0] for name, process in running.items()}
    asked = re.compile(rf"waiting for (GET|LIST) of {URI}.* at {silent.endpoint}; without an answer this ends after 70 s")
    for name, process in running.items():
        assert process.returncode == 1, (name, said[name])
        assert len(asked.findall(said[name])) == said[name].count("waiting") == 1, (name, said[name])
        assert f"{silent.endpoint} does not answer" in said[name], (name, said[name])
