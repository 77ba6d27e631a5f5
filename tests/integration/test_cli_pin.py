"""``raystow pin`` and ``raystow unpin`` on a real repository."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.local_cluster import LocalCluster

from integration.cli_runner import run, run_json
from raystow.storage.errors import StateError
from raystow.storage.repository import open_repository


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with LocalCluster(str(tmp_path / "run")) as local:
        for step in (100, 200, 300):
            local.save({"w": torch.randn(10)}, step=step)
    return tmp_path / "run"


def pins(folder: Path) -> dict[str, int]:
    return open_repository(str(folder)).root().pins


def test_a_pinned_version_is_not_pruned_until_it_is_unpinned(folder):
    result = run("pin", folder, 1, "paper")
    assert (result.exit_code, result.stdout) == (0, "version 1 (step 100) is pinned as paper\n")
    assert run_json("show", folder, "paper")["id"] == 1
    assert run_json("prune", folder, "--keep-last", 1)["dropped"] == [2]
    result = run("unpin", folder, "paper")
    assert (result.exit_code, result.stdout) == (0, "version 1 is no longer pinned as paper; retention may drop it now\n")
    assert run_json("prune", folder, "--keep-last", 1)["dropped"] == [1]


def test_a_pin_moves_only_with_the_move_option(folder):
    run("pin", folder, 1, "best")
    error = run_json("pin", folder, "latest", "best", code=2)["error"]
    assert (error["kind"], error["what"]) == ("StateError", "'best' is version 1")
    assert "--move" in error["remedy"]
    assert pins(folder) == {"best": 1}
    assert run("pin", folder, 1, "best").exit_code == 0  # the pin is already on this version
    result = run("pin", folder, "latest", "best", "--move")
    assert (result.exit_code, pins(folder)) == (0, {"best": 3})
    assert result.stdout == "version 3 (step 300) is pinned as best; the name was version 1's\n"


def test_a_pin_that_another_writer_set_is_not_moved(folder):
    mine, other = open_repository(str(folder)), open_repository(str(folder))
    chosen = mine.version(2)
    other.pin(other.version(3), "best")
    with pytest.raises(StateError, match="'best' is version 3"):
        mine.pin(chosen, "best", move=False)
    assert pins(folder) == {"best": 3}


def test_a_version_can_have_several_pins(folder):
    run("pin", folder, 2, "a")
    facts = run_json("pin", folder, "a", "b")
    assert facts == {"uri": folder.as_uri(), "name": "b", "version": 2, "step": 200, "before": None}
    assert run("unpin", folder, "a").stdout == "version 2 is no longer pinned as a; it is still pinned as b\n"
    assert run_json("unpin", folder, "b") == {"uri": folder.as_uri(), "name": "b", "version": 2}
    assert pins(folder) == {}


def test_a_missing_version_or_pin_is_not_found(folder):
    assert run_json("pin", folder, 9, "best", code=4)["error"]["kind"] == "NotFound"
    assert run_json("unpin", folder, "best", code=4)["error"]["remedy"] == "`raystow ls` lists versions and pins"
    run("pin", folder, 1, "good")
    assert run_json("unpin", folder, "godo", code=4)["error"]["remedy"] == "the pins are good"
    assert pins(folder) == {"good": 1}


@pytest.mark.parametrize("name", ["latest", "7", "step:7", "step:x", "", " ", "a\x1b[31m", "x" * 101])
def test_invalid_pin_names_are_refused(folder, name):
    assert run("pin", folder, 1, name).exit_code == 2
    assert pins(folder) == {}


@pytest.mark.parametrize("command", ["pin", "unpin"])
def test_help_has_an_example_and_fits_80_columns(command):
    result = run(command, "--help")
    assert f"Example:  raystow {command} s3://" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
