"""``raystow rollback``, and the output of other commands for rolled-back versions, on a real repository."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.local_cluster import LocalCluster

import raystow
from integration.cli_runner import run, run_json


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with LocalCluster(str(tmp_path / "run")) as local:
        for step in (100, 200, 300):
            local.save({"w": torch.full((10,), float(step))}, step=step)
    return tmp_path / "run"


def restored(folder: Path) -> float:
    into = {"w": torch.zeros(10)}
    assert raystow.restore_latest(folder, into=into) is not None
    return float(into["w"][0])


def test_later_restores_start_from_the_chosen_version(folder: Path) -> None:
    result = run("rollback", folder, 1)
    assert result.exit_code == 0
    assert result.stdout == (
        "version 1 (step 100) is the newest; 2 versions rolled back\n"
        "versions saved from now on are newer: stop a training that still runs\n"
        "`raystow rollback URI 3` undoes this\n"
    )
    assert restored(folder) == 100
    latest = raystow.latest(folder)
    assert latest is not None
    assert latest.id == 1
    assert run_json("show", folder)["id"] == 1
    with LocalCluster(str(folder)) as local:
        local.save({"w": torch.full((10,), 150.0)}, step=150)
    assert restored(folder) == 150


def test_rolled_back_versions_are_listed_and_readable_by_id(folder: Path) -> None:
    run("rollback", folder, 2)
    listed = run_json("ls", folder)
    assert [row["id"] for row in listed["versions"]] == [1, 2]
    assert [row["id"] for row in listed["rolled_back"]] == [3]
    table = run("ls", folder).stdout.splitlines()
    assert ["rolled back" in line for line in table if " 300 " in line] == [True]
    assert sum("rolled back" in line for line in table) == 1
    shown = run_json("show", folder, 3)
    assert shown["rolled_back"] == listed["rolled_back"][0]["at"]
    assert run_json("show", folder, 2)["rolled_back"] is None
    assert "rolled back" in run("show", folder, 3).stdout
    assert [row["id"] for row in run_json("verify", folder, "--all", "--deep")["versions"]] == [1, 2, 3]
    assert float(raystow.open(folder).version(3).read("w")[0]) == 300


def test_rollback_to_the_newest_version_undoes_a_rollback(folder: Path) -> None:
    assert run_json("rollback", folder, 1) == {
        "uri": raystow.open(folder).uri,
        "version": 1,
        "step": 100,
        "before": 3,
        "rolled_back": [2, 3],
    }
    assert run_json("rollback", folder, 3)["rolled_back"] == []
    assert [row["id"] for row in run_json("ls", folder)["versions"]] == [1, 2, 3]
    assert restored(folder) == 300


def test_retention_drops_rolled_back_versions_without_a_pin(folder: Path) -> None:
    run("rollback", folder, 1)
    run("pin", folder, 2, "evidence")
    assert run_json("prune", folder, "--keep-last", 2)["dropped"] == []
    assert run_json("prune", folder, "--drop-rolled-back")["dropped"] == [3]
    assert run_json("rollback", folder, 3, code=4)["error"]["kind"] == "NotFound"
    assert run_json("rollback", folder, "evidence")["version"] == 2


def test_objects_of_rolled_back_versions_are_not_garbage(folder: Path) -> None:
    run("rollback", folder, 1)
    assert run_json("gc", folder, "--grace", "0s", "--yes")["deleted"]["attempts"] == 0
    assert restored(folder) == 100
