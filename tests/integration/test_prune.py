"""``raystow prune`` on real repositories."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer
from helpers.builders import orphans
from helpers.local_cluster import LocalCluster

from integration.cli_runner import run, run_json
from raystow.cli import options
from raystow.storage.repository import create_repository, open_repository


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository of five versions: the second is pinned, and the third has the lowest loss."""
    with LocalCluster(str(tmp_path / "run")) as local:
        for step, loss in zip((100, 200, 300, 400, 500), (5.0, 4.0, 1.0, 2.0, 3.0), strict=True):
            version = local.save({"w": torch.randn(100, 100)}, step=step, metrics={"loss": loss})
            if step == 200:
                local.repository.pin(version, "good")
    return tmp_path / "run"


def live(folder: Path) -> list[int]:
    return [version.id for version in open_repository(str(folder)).versions()]


def test_a_dry_run_lists_every_version_with_the_rule(folder: Path) -> None:
    result = run("prune", folder, "--keep-last", 2, "--keep-best", "loss:min:1", "--dry-run")
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[0].split() == ["ID", "STEP", "CREATED", "STORED", "WHY"]
    assert [line.split("KiB  ")[1] for line in lines[1:6]] == [
        "drop  no rule keeps it",
        "keep  pinned as good",
        "keep  best loss (min)",
        "keep  last 2",
        "keep  newest, last 2",
    ]
    assert lines[6].startswith("keep 4 versions, ")
    assert "nothing was dropped" in lines[7]
    assert "objects of dropped versions stay in the store" in " ".join(lines[7:])
    assert max(map(len, lines)) <= 80
    assert live(folder) == [1, 2, 3, 4, 5]


def test_prune_asks_before_it_drops(folder: Path) -> None:
    refused = run("prune", folder, "--keep-last", 2, input="n\n")
    assert (refused.exit_code, live(folder)) == (0, [1, 2, 3, 4, 5])
    assert "drop 2 versions? [y/N]" in refused.stderr
    assert "nothing was dropped" in refused.stdout
    agreed = run("prune", folder, "--keep-last", 2, input="y\n")
    assert (agreed.exit_code, live(folder)) == (0, [2, 4, 5])
    assert "dropped 2 versions; the objects of dropped versions stay in the store" in " ".join(agreed.stdout.split())
    assert len(orphans(open_repository(str(folder)))) > 2
    again = run("prune", folder, "--keep-last", 2)  # no version to drop, so no question
    assert (again.exit_code, again.stderr) == (0, "")


def test_prune_without_an_answer_drops_nothing(folder: Path) -> None:
    result = run("prune", folder, "--keep-last", 2)
    assert (result.exit_code, live(folder)) == (2, [1, 2, 3, 4, 5])
    assert "--yes" in result.stderr
    assert run("prune", folder, "--keep-last", 2, "--yes").exit_code == 0
    assert live(folder) == [2, 4, 5]


def test_json_output_lists_the_decisions(folder: Path) -> None:
    facts = run_json("prune", folder, "--keep-every", 250, "--dry-run")
    assert (facts["uri"], facts["dry_run"], facts["dropped"]) == (folder.as_uri(), True, [])
    assert live(folder) == [1, 2, 3, 4, 5]
    facts = run_json("prune", folder, "--keep-every", 250)
    assert (facts["dry_run"], facts["dropped"], live(folder)) == (False, [1, 3], [2, 4, 5])
    assert [row["keep"] for row in facts["versions"]] == [False, True, False, True, True]
    assert facts["versions"][4]["rules"] == ["newest", "newest of steps 500 to 749"]
    about = {"keep", "thin", "stored_thin", "compact", "stored_whole", "rules"}
    assert set(facts["versions"][0]) == {"id", "step", "created", "age", "stored", *about}
    assert run("verify", folder, "--all").exit_code == 0


def test_max_bytes_drops_the_oldest_versions(folder: Path) -> None:
    stored = sum(version.bytes for version in open_repository(str(folder)).versions())
    assert run_json("prune", folder, "--max-bytes", stored)["dropped"] == []
    assert run_json("prune", folder, "--max-bytes", stored - 1)["dropped"] == [1]
    result = run("prune", folder, "--max-bytes", "1kB", "--yes")
    assert "the versions that are always kept take more than 0.98 KiB" in result.stdout
    assert live(folder) == [2, 5]


def test_a_pin_set_during_the_question_is_respected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer() -> str:
        repository = open_repository(str(folder))
        repository.pin(repository.version(3), "late")
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    result = run("prune", folder, "--keep-interval", "9999d", "--keep-last", 1)
    assert result.exit_code == 0, result.output
    assert "1 version unchanged: pinned, verified" in result.stdout
    assert live(folder) == [2, 3, 5]


def test_an_unknown_metric_is_refused(folder: Path) -> None:
    error = run_json("prune", folder, "--keep-best", "lost:min:1", code=2)["error"]
    assert "'lost'" in error["what"]
    assert live(folder) == [1, 2, 3, 4, 5]


def test_missing_rules_are_a_usage_error_with_an_example(folder: Path) -> None:
    result = run("prune", folder)
    assert (result.exit_code, live(folder)) == (2, [1, 2, 3, 4, 5])
    assert "--keep-last 3" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--keep-last", "0"],
        ["--keep-interval", "6"],
        ["--keep-interval", "0.1s"],
        ["--keep-best", "loss:least:1"],
        ["--keep-best", "loss"],
        ["--max-bytes", "2TX"],
        ["--max-bytes", "0"],
    ],
)
def test_invalid_arguments_are_usage_errors(folder: Path, words: list[str]) -> None:
    assert run("prune", folder, *words, "--yes").exit_code == 2
    assert live(folder) == [1, 2, 3, 4, 5]


def test_a_limit_of_zero_is_refused_with_a_remedy(folder: Path) -> None:
    assert "omit the option" in " ".join(run("prune", folder, "--max-bytes", 0).stderr.split())


def test_empty_and_missing_repositories_are_handled(tmp_path: Path) -> None:
    assert run("prune", tmp_path, "--keep-last", 1).exit_code == 4
    create_repository(str(tmp_path))
    result = run("prune", tmp_path, "--keep-last", 1, "--keep-best", "loss:min:1")
    assert (result.exit_code, "no version yet" in result.stdout) == (0, True)
    assert run_json("prune", tmp_path, "--keep-last", 1)["versions"] == []


def test_help_has_an_example_and_fits_80_columns() -> None:
    result = run("prune", "--help")
    assert "Example:  raystow prune s3://" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_quantities_are_parsed() -> None:
    assert [options.duration(text) for text in ("90s", "30m", "6h", "1d", "1.5 H")] == [90, 1800, 21600, 86400, 5400]
    assert [options.nbytes(text) for text in ("7", "2TB", "1.5kib", "3 GiB", "5b")] == [7, 2 * 10**12, 1536, 3 << 30, 5]
    assert options.best("eval:loss:max:12") == ("eval:loss", "max", 12)
    for wrong in ("", "6", "h", "-6h", "6y", "1e3s"):
        with pytest.raises(typer.BadParameter):
            options.duration(wrong)
