"""``raystow gc`` on real repositories."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from helpers.local_cluster import LocalCluster

from integration import cli_runner
from integration.cli_runner import run_json
from raystow.storage.format import keys
from raystow.storage.repository import open_repository

run = functools.partial(cli_runner.run, columns=120)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def live(folder: Path) -> set[str]:
    """Return the files that a repository needs."""
    homes = tuple(keys.prefix(version.id, version.attempt) for version in open_repository(str(folder)).versions())
    return {keys.MARKER, keys.ROOT, ".raystow.lock"} | {name for name in files(folder) if name.startswith(homes)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository of four versions, two of them dropped, with incomplete objects of killed writers."""
    folder = tmp_path / "run"
    with LocalCluster(str(folder)) as local:
        for step in range(4):
            local.save({"w": torch.randn(100, 100)}, step=step)
    assert run("prune", folder, "--keep-last", 2, "--yes").exit_code == 0
    attempt = folder / keys.prefix(9, "0123456789abcdef")
    attempt.mkdir()
    (attempt / "weights-00000-00000.pack").write_bytes(b"half a save")
    (attempt / ".raystow.tmp-0123456789abcdef").write_bytes(b"half a pack")
    return folder


def test_nothing_is_deleted_within_the_default_grace_period(folder: Path) -> None:
    before = files(folder)
    result = run("gc", folder)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("the grace period ends in") == 3
    assert files(folder) == before


def test_gc_deletes_garbage_but_not_in_a_dry_run(folder: Path) -> None:
    before = files(folder)
    result = run("gc", folder, "--grace", "0s", "--dry-run")
    assert result.exit_code == 0, result.output
    assert [line.split()[2] for line in result.stdout.splitlines()[1:4]] == ["dropped", "dropped", "may"]
    assert max(map(len, result.stdout.splitlines())) <= 120
    assert files(folder) == before
    facts = run_json("gc", folder, "--grace", "0s")
    assert [(row["id"], row["kind"], row["kept"]) for row in facts["garbage"]] == [
        (1, "dropped", ""),
        (2, "dropped", ""),
        (9, "open", ""),
    ]
    assert facts["deleted"]["attempts"] == 3
    assert facts["deleted"]["scraps"] == 1
    assert files(folder) == live(folder)
    assert run("verify", folder, "--all", "--deep").exit_code == 0
    assert "nothing to collect" in run("gc", folder, "--grace", "0s").stdout


def test_gc_asks_before_it_deletes(folder: Path) -> None:
    before = files(folder)
    refused = run("gc", folder, "--grace", "0s", input="n\n")
    assert (refused.exit_code, files(folder)) == (0, before)
    assert "delete" in refused.stderr
    unanswered = run("gc", folder, "--grace", "0s")
    assert (unanswered.exit_code, files(folder)) == (2, before)
    assert "nothing was deleted" in unanswered.stderr
    agreed = run("gc", folder, "--grace", "0s", input="y\n")
    assert agreed.exit_code == 0
    assert agreed.stdout.splitlines()[-1].startswith("deleted 7 objects, ")
    assert files(folder) == live(folder)


def test_a_damaged_root_is_refused(folder: Path) -> None:
    root = folder / keys.ROOT
    root.write_bytes(root.read_bytes()[:-3])
    before = files(folder)
    result = run("gc", folder, "--grace", "0s", "--yes")
    assert (result.exit_code, files(folder)) == (3, before)
    assert "root.json" in result.stderr
    assert "raystow repair" in result.stderr


@pytest.mark.parametrize("text", ["soon", "1000000000d"])
def test_invalid_durations_are_refused(folder: Path, text: str) -> None:
    result = run("gc", folder, "--grace", text)
    assert result.exit_code == 2
    assert "duration" in result.stderr
