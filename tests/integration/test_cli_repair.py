"""``raystow repair`` on a real repository."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest
import torch
from helpers.local_cluster import LocalCluster

import raystow
from integration import cli_runner
from integration.cli_runner import run_json
from raystow.storage.format import keys

run = functools.partial(cli_runner.run, columns=120)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repair") / "run"
    with LocalCluster(str(folder)) as local:
        for step in (100, 200, 300):
            local.save({"w": torch.full((100,), step)}, step=step)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A repository of three versions without its root and the pack of the second version."""
    shutil.copytree(made, tmp_path / "run")
    version = raystow.open(tmp_path / "run").version(2)
    (tmp_path / "run" / keys.pack(2, version.attempt, 0, "weights", 0)).unlink()
    (tmp_path / "run" / "root.json").unlink()
    return tmp_path / "run"


def steps(folder: Path) -> list[int]:
    return [version.step for version in raystow.open(folder).versions()]


def test_repair_shows_its_findings_and_asks(folder: Path) -> None:
    refused = run("repair", folder, input="n\n")
    assert refused.exit_code == 0, refused.output
    lines = [line.rstrip() for line in refused.stdout.splitlines()]
    assert lines[:2] == ["root.json: missing", "raystow.json: whole"]
    assert [line.split()[0] for line in lines[3:6]] == ["1", "2", "3"]
    assert lines[3].endswith("back")
    assert lines[4].endswith("left out  weights-00000-00000.pack is missing")
    assert lines[6].startswith("note: pins are lost")
    assert lines[-1] == "nothing was written"
    assert "write root.json, with 2 versions? [y/N]" in refused.stderr
    assert not (folder / "root.json").exists()
    agreed = run("repair", folder, input="y\n")
    assert (agreed.exit_code, "wrote root.json" in agreed.stdout) == (0, True)
    assert steps(folder) == [100, 300]
    assert run("verify", folder, "--all", "--deep").exit_code == 0
    target = {"w": torch.zeros(100, dtype=torch.int64)}
    assert raystow.restore_latest(folder, into=target).step == 300
    assert torch.equal(target["w"], torch.full((100,), 300))


def test_a_dry_run_writes_nothing(folder: Path) -> None:
    result = run("repair", folder, "--dry-run")
    assert (result.exit_code, result.stderr) == (0, "")
    assert not (folder / "root.json").exists()


def test_json_writes_only_with_yes(folder: Path) -> None:
    facts = run_json("repair", folder)
    assert (facts["written"], facts["dry_run"], facts["root"]) == ([], False, {"state": "missing", "why": ""})
    assert [(row["id"], row["back"]) for row in facts["found"]] == [(1, True), (2, False), (3, True)]
    assert set(facts["found"][0]) == {"id", "attempt", "epoch", "step", "created", "stored", "back", "why"}
    assert not (folder / "root.json").exists()
    assert run_json("repair", folder, "--yes", "--dry-run")["written"] == []
    facts = run_json("repair", folder, "--yes")
    assert (facts["written"], facts["repository"]) == (["root.json"], raystow.open(folder).id)
    assert steps(folder) == [100, 300]


def test_repair_without_an_answer_writes_nothing(folder: Path) -> None:
    result = run("repair", folder)
    assert (result.exit_code, "nothing was written" in result.stderr) == (2, True)
    assert not (folder / "root.json").exists()


def test_repair_does_not_change_a_whole_repository(made: Path) -> None:
    before = (made / "root.json").read_bytes()
    result = run("repair", made)
    assert (result.exit_code, "nothing to repair" in result.stdout) == (0, True)
    facts = run_json("repair", made, "--yes")
    assert (facts["root"]["state"], facts["found"], facts["written"]) == ("whole", [], [])
    assert (made / "root.json").read_bytes() == before


@pytest.mark.parametrize("name", ["root.json", "raystow.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_errors_of_a_damaged_repository_recommend_repair(made: Path, tmp_path: Path, name: str, damage: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(made, folder)
    (folder / name).write_bytes((folder / name).read_bytes()[:100]) if damage == "cut" else (folder / name).unlink()
    for words in (["ls"], ["gc", "--yes"], ["prune", "--keep-last", "1", "--yes"], ["verify"]):
        result = run(words[0], folder, *words[1:])
        assert (result.exit_code, "try: `raystow repair URI`" in result.stderr) == (3, True), result.output
    with pytest.raises(raystow.Damaged, match="raystow repair"):
        LocalCluster(str(folder))
    assert run("repair", folder, "--yes").exit_code == 0
    assert steps(folder) == [100, 200, 300]
    with LocalCluster(str(folder)) as local:
        assert local.save({"w": torch.zeros(100)}, step=400).id == 4


def test_a_missing_repository_is_not_found(tmp_path: Path) -> None:
    assert run("repair", tmp_path / "nothing").exit_code == 4


def test_help_has_an_example() -> None:
    assert "Example:  raystow repair s3://" in run("repair", "--help").stdout
