"""Rules for every command: its JSON output has a schema, its text fits 80 columns, and the shell completes it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from helpers.local_cluster import LocalCluster

from integration.cli_runner import run, run_json
from integration.schemas import FOLDER
from raystow.cli.app import build
from raystow.storage.retention.collect import GarbageKind

COMMANDS = dict(typer.main.get_command(build()).commands)  # type: ignore[attr-defined]
PRICES = ("--gpus", 8, "--gpu-price", 4, "--store-price", 0.02, "--every", "1h", "--write-rate", "5GB")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A repository of three versions with tensor names of a real model and one plain value."""
    with LocalCluster(str(tmp_path / "llama")) as local:
        for step in (100, 200, 300):
            torch.manual_seed(step)
            layers = {f"model.layers.{i}.self_attn.q_proj.weight": torch.randn(200, 100).bfloat16() for i in range(30)}
            local.save(
                {**layers, "optim": {"exp_avg": torch.randn(600, 100)}, "tokens": step}, step=step, metrics={"loss": 1 / step}
            )
    return tmp_path


def test_every_json_output_has_a_schema() -> None:
    with_json = {name for name, command in COMMANDS.items() if any("--json" in option.opts for option in command.params)}
    assert with_json == {path.stem for path in FOLDER.glob("*.json")} - {"error", "replica_difference"}
    assert {*COMMANDS} - with_json == {"demo"}


def test_the_schema_of_gc_names_every_kind_of_garbage() -> None:
    garbage = json.loads((FOLDER / "gc.json").read_text())["properties"]["garbage"]["items"]["properties"]
    assert garbage["kind"]["enum"] == [kind.name.lower() for kind in GarbageKind]


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_80_columns(name: str) -> None:
    result = run(*([name] if name else []), "--help")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "Example:" in result.stdout
    assert not re.search(r"<(bool|str|int|float|path|file)", result.stdout)


def test_the_text_output_fits_80_columns(runs: Path) -> None:
    wide = list[tuple[str, str]]()
    llama, key = runs / "llama", runs / "key.pem"
    for words in (
        ("ls", llama, "--long"),
        ("show", llama),
        ("pin", llama, 1, "a-name-of-some-length-for-a-pin"),
        ("pin", llama, 2, "a-name-of-some-length-for-a-pin", "--move"),
        ("diff", llama, 1, 2),
        ("diff", llama, 1, 2, "--deep"),
        ("verify", llama, "--all"),
        ("verify", llama, "--all", "--deep", "--resume", runs / "j.jsonl"),
        ("verify", llama, "--all", "--deep", "--resume", runs / "j.jsonl"),
        ("restore", llama, "--output", runs / "out"),
        ("export", llama, "--hf", runs / "hf"),
        ("cp", llama, runs / "replica"),
        ("import", runs / "out", runs / "imported"),
        ("plan", llama, "--world", 48),
        ("unpin", llama, "a-name-of-some-length-for-a-pin"),
        ("prune", llama, "--keep-last", 1, "--yes"),
        ("gc", llama, "--grace", "0s", "--yes"),
        ("repair", llama, "--yes"),
        ("cost", llama, *PRICES),
        ("advise", llama, "--mtbf", "12h", "--budget", "0.5"),
        ("keygen", key),
        ("doctor", llama),
        ("ls", runs / "nowhere"),
    ):
        result = run(*words)
        assert result.exit_code in (0, 4), result.output
        # The lengths of the user's own paths do not count.
        wide += [(words[0], line) for line in result.output.replace(str(runs), "/r").splitlines() if len(line) > 80]
    assert not wide, "\n".join(map(str, wide))


def test_output_of_less_tested_commands_matches_its_schema(runs: Path) -> None:
    llama = runs / "llama"
    run_json("unpin", llama, run_json("pin", llama, 1, "x")["name"])
    run_json("import", runs / "out", runs / "imported", "--step", run_json("restore", llama, "--output", runs / "out")["step"])
    assert run_json("ls", runs / "nowhere", code=4)["error"]["kind"] == "NotARepository"


TAKING_A_VERSION = {
    "show": (("VERSION",), ("id",)),
    "diff": (("VERSION", "VERSION"), ("after", "version")),
    "verify": (("VERSION",), ("versions", 0, "id")),
    "restore": (("VERSION", "--output", "OUT"), ("version",)),
    "export": (("VERSION", "--torch", "OUT"), ("version",)),
    "cp": (("OUT", "--versions", "VERSION"), ("copied", 0)),
    "plan": (("VERSION",), ("version",)),
    "rollback": (("VERSION",), ("version",)),
    "pin": (("VERSION", "again", "--move"), ("version",)),
    "compact": (("VERSION", "--dry-run"), None),
}
"""The arguments of each command, and the keys of the version's id in its output."""


def test_every_command_that_takes_a_version_is_tested() -> None:
    with_version = {name for name, command in COMMANDS.items() if any(option.metavar == "VERSION" for option in command.params)}
    assert with_version == TAKING_A_VERSION.keys()


@pytest.mark.parametrize("command", TAKING_A_VERSION)
def test_a_version_is_selected_by_id_pin_step_or_latest(runs: Path, command: str) -> None:
    llama, (words, place) = runs / "llama", TAKING_A_VERSION[command]
    run_json("pin", llama, 2, "best")

    def output(which: str, code: int = 0) -> dict[str, Any]:
        named = {"VERSION": which, "OUT": runs / f"out-{which}"}
        return run_json(command, llama, *(named.get(word, word) for word in words), code=code)

    for which, what in (("9", "version 9"), ("bset", "pin 'bset'"), ("step:150", "version of step 150")):
        error = output(which, code=4)["error"]
        assert (error["kind"], error["what"]) == ("NotFound", f"there is no {what}")
        assert error["remedy"].startswith("the newest versions are 1 (step 100), 2 (step 200), 3 (step 300), and pins are ")
    assert output("step:x", code=2)["error"]["what"] == "version is 'step:x'"
    # Newest first, because a rolled-back version is not found by its step.
    for which, id in (("latest", 3), ("step:300", 3), ("best", 2), ("step:100", 1), ("1", 1)):
        found: Any = output(which)
        for key in place or ():
            found = found[key]
        assert place is None or found == id


def test_bash_completes_commands_and_options() -> None:
    def completed(line: str) -> list[str]:
        environment = {**os.environ, "_RAYSTOW_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        program = [sys.executable, "-m", "raystow"]
        return subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120).stdout.split()

    assert completed("raystow ve") == ["verify"]
    assert "--deep" in completed("raystow verify --")
    script = subprocess.run(
        [sys.executable, "-m", "raystow"], env={**os.environ, "_RAYSTOW_COMPLETE": "source_bash"}, capture_output=True, text=True
    ).stdout
    known = subprocess.run(["bash", "-c", f"{script}\ncomplete -p raystow"], capture_output=True, text=True, timeout=60)
    assert known.returncode == 0, known.stderr
    assert "raystow" in known.stdout
